"""The settings that a run is verified with, where they differ from its own."""

from __future__ import annotations

from weft.core import OFF, ConfigError, LocalSteps, PrecisionConfig, RunConfig, SyncConfig
from weft.sync import make_sync

from .difference import BOUNDS
from .replica_reference import shortened

CODEC_WARMUP = 8  # steps, at most, of a short run


def on_cpus(run: RunConfig) -> RunConfig:
    """The run without what GPUs alone do: verify computes on CPUs."""
    without = {"async_tp": False, "offload_activations": False, "memory_snapshot": None}
    return run.model_copy(update={"train": run.train.model_copy(update=without)})


def verified_precision(trained: PrecisionConfig, precision: str) -> PrecisionConfig:
    """The [precision] that a run is verified with. Raises ConfigError."""
    check_precision(precision, trained.float8 != OFF)
    if precision == "float8":
        return trained
    reduce = trained.reduce if precision == "bf16" else "fp32"
    return PrecisionConfig.model_validate({"compute": precision, "reduce": reduce})


def verified_sync(sync: SyncConfig, precision: str) -> SyncConfig:
    """The synchroniser that a run is verified with. In lower precision an exact one: a rounding may
    change by far what a codec tells, and what replicas do by themselves."""
    return sync if precision == "fp64" else exact_sync(sync)


def exact_sync(sync: SyncConfig) -> SyncConfig:
    """The same synchroniser with gradients as they are, or an all-reduce where replicas step by
    themselves: what is other by design is not to be told from a fault."""
    made = make_sync(sync.name, sync.codec, **sync.arguments)
    return sync.model_copy(update={"codec": "identity"}) if not made.independent else SyncConfig()


def deep_sync(sync: SyncConfig) -> SyncConfig:
    """The synchroniser that `--deep` trains with: the run's, with a warm-up of its codec that a
    short run ends; where replicas exchange weights, with a period that it has twice."""
    codec = sync.codec
    if isinstance(codec, dict) and codec.get("warmup", 0) > CODEC_WARMUP:
        sync = sync.model_copy(update={"codec": {**codec, "warmup": CODEC_WARMUP}})
    made = make_sync(sync.name, sync.codec, **sync.arguments)
    if not isinstance(made, LocalSteps):
        return sync
    changed = {
        key: getattr(shortened(made), key)
        for key in ("period", "fragments", "delay")
        if getattr(shortened(made), key) != getattr(made, key)
    }
    return SyncConfig(name=sync.name, codec=sync.codec, **{**sync.arguments, **changed})


def deep_precision(trained: PrecisionConfig) -> PrecisionConfig | None:
    """In which `--deep` holds a run to its own resuming beside float64. None: the run computes in
    float64, or in float8, which needs GPUs."""
    alone = trained.compute == "fp64" or trained.float8 != OFF
    return None if alone else trained


def is_asynchronous(sync: SyncConfig) -> bool:
    """Whether servers take gradients as they arrive."""
    return make_sync(sync.name, sync.codec, **sync.arguments).asynchronous


def check_precision(precision: str, float8: bool) -> None:
    """Refuse what layouts are not verified in. `float8`: whether the run trains with it. Raises
    ConfigError."""
    if precision not in BOUNDS:
        fix = "choose fp64 (which tells faults from rounding), bf16, fp16 or float8"
        raise ConfigError("--precision", precision, "is not a precision in which verify runs", fix)
    if precision == "float8" and not float8:
        fix = 'set [precision] float8 = "rowwise", or verify in bf16'
        raise ConfigError("--precision", precision, "the run multiplies nothing in float8", fix)
