"""Reads a run file into a RunConfig, applies overrides, and checks it. Pure data; no torch.

    [model]        build = "package.module:callable" | hf = "a configuration or model directory"
    [data]         build = "package.module:callable" | text = ["corpus/*.txt"] | stream | hf | chat
    [layout]       axes = "dp2.tp2", fsdp_units = "blocks"
    [layout.parts] "vision" = "fsdp"
    [train]        batch, steps, loss, schedule, logging ...
    [lr_schedule]  build = "package.module:callable", and its own arguments
    [optimizer]    name | build, no_decay, groups ..., and that optimizer's own arguments
    [precision]    compute = "fp32"
    [checkpoint]   every, keep, keep_every, keep_best, restarts
    [pipeline]     schedule = "1f1b", cut = "parameters", and that schedule's own arguments
    [sync]         name = "allreduce", codec = "identity", and that synchroniser's own arguments
    [roles]        "blocks.*.up" = "column"
    [workers]      storage = ["embedding"]

All other keys of [model], [data], [lr_schedule], [optimizer], [pipeline] and [sync] are arguments
of what the table names; `weft.train.build` checks them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from .data_config import DataConfig
from .errors import ConfigError, nearest
from .files import read_file
from .layout_config import LayoutConfig
from .schedule import DEFAULT_SCHEDULE
from .toml import CallableTable, Strings, TomlTable, exactly_one, table_error, toml_refusal
from .toml_slips import toml_fix, toml_problem
from .train_config import TrainConfig

DEFAULT_LOSS = "weft.losses:next_token"
DEFAULT_OPTIMIZER = "adamw"
# of [train], which say what the learning rate of a step is
RATE_KEYS = (
    "warmup",
    "warmup_shape",
    "start_lr_ratio",
    "decay",
    "decay_share",
    "min_lr_ratio",
)
Task = Literal[
    "causal-lm",
    "masked-lm",
    "seq2seq-lm",
    "sequence-classification",
    "token-classification",
    "image-classification",
    "zero-shot-image-classification",
    "image-text-to-text",
    "audio-classification",
    "speech-seq2seq",
    "text-to-waveform",
]


class ModelConfig(CallableTable):
    """[model]"""

    build: str | None = Field(
        default=None, description='"package.module:callable" that returns an nn.Module'
    )
    hf: str | None = Field(
        default=None, description="a Hugging Face configuration file or model directory"
    )
    auto: Task | None = Field(
        default=None, description="task of the Hugging Face model (default causal-lm)"
    )
    inputs: Strings | None = Field(
        default=None, description="the batch entries that the model is called with"
    )

    adapter: str | dict[str, Any] | None = Field(
        default=None,
        description=(
            "an adapter of peft; only the adapter is trained: a directory that peft saved, or"
            ' its arguments, as in { r = 8, target_modules = ["q_proj", "v_proj"] }'
            " (docs/fine_tuning.md)"
        ),
    )
    quantize: Literal["int8", "nf4"] | None = Field(
        default=None,
        description=(
            '"int8" or "nf4": with an adapter, store the weights of frozen linears in 8 or 4'
            " bits (docs/fine_tuning.md)"
        ),
    )
    freeze: Strings = Field(
        default=(),
        description=(
            'globs of parameters that are not trained, as in ["embedding.*", "blocks.0.*"]'
            " (docs/fine_tuning.md)"
        ),
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        exactly_one(build=self.build, hf=self.hf)
        if self.quantize is not None and self.adapter is None:
            raise table_error(
                "applies to the frozen weights beside an adapter, and the run has no adapter",
                "set model.adapter, or leave it out",
                quantize=self.quantize,
            )
        if self.auto is not None and self.hf is None:
            raise table_error(
                "is only for Hugging Face models",
                "leave auto out, or name a model with hf",
                auto=self.auto,
            )
        return self


class LRScheduleConfig(CallableTable):
    """[lr_schedule]"""

    build: str | None = Field(
        default=None,
        description=(
            '"package.module:callable" that returns a function from a step (the first is 0) to'
            " the factor of the learning rate, in place of warmup and decay of [train]; it gets"
            " `steps` if it has that parameter"
        ),
    )

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.build is None and self.arguments:
            raise table_error(
                "has arguments, and no callable that takes them",
                'write build = "package.module:callable", or leave the table out',
                **self.arguments,
            )
        return self


class OptimizerConfig(CallableTable):
    """[optimizer]"""

    usual = ("lr", "weight_decay", "betas", "eps", "momentum")

    # None beside build alone
    name: str | None = Field(
        default=None,
        description="an optimizer of docs/optimizers.md (default adamw, if build names none)",
    )
    build: str | None = Field(
        default=None,
        description=(
            '"package.module:callable" of (parameters, **arguments) that makes the optimizer, in'
            " place of name: a class of torch.optim.Optimizer, or a function"
        ),
    )
    updates_each: Literal["element", "tensor"] | None = Field(
        default=None,
        description=(
            '"element" or "tensor": how much of a parameter an update by `build` reads (default:'
            " the mark of its class, docs/optimizers.md)"
        ),
    )
    no_decay: Strings = Field(
        default=(),
        description='globs of parameters without weight decay, as in ["*norm*", "*.bias"]',
    )
    decay_min_dims: int = Field(
        default=0,
        ge=0,
        description=(
            "parameters with fewer dims have no weight decay; 2 spares all norms and biases"
        ),
    )
    groups: dict[str, dict[str, Any]] = Field(
        default={},
        description=(
            'glob of parameters -> arguments that differ for them, as in "embedding.*" ='
            " { lr = 1e-4 }; the first match applies"
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _named(cls, table: object) -> object:
        if isinstance(table, dict) and table.get("name") is None and table.get("build") is None:
            return {**table, "name": DEFAULT_OPTIMIZER}
        return table

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.name is not None and ":" in self.name:
            problem, fix = "is code, not the name of an optimizer", f'write build = "{self.name}"'
            raise table_error(problem, fix, name=self.name)
        if self.build is not None and self.name is not None:
            raise table_error("is given beside build", "leave one of them out", name=self.name)
        if self.build is None and self.updates_each is not None:
            fix = "leave it out: weft knows it of its own optimizers"
            raise table_error("has no effect without build", fix, updates_each=self.updates_each)
        return self


class PrecisionConfig(TomlTable):
    """[precision]"""

    compute: Literal["fp32", "bf16", "fp16", "fp64"] = Field(
        default="fp32", description="dtype of computation"
    )
    reduce: Literal["fp32", "bf16"] = Field(
        default="fp32", description="dtype in which gradients are summed, if computed in bf16"
    )
    float8: Literal["off", "rowwise", "rowwise_with_gw_hp", "tensorwise"] = Field(
        default="off",
        description=(
            "torchao's recipe for float8 matmuls of linears, if computed in bf16"
            " (docs/precision.md)"
        ),
    )


class CheckpointConfig(TomlTable):
    """[checkpoint]"""

    every: int = Field(default=0, ge=0, description="steps between checkpoints; 0: none")
    keep: int = Field(default=3, gt=0, description="number of latest checkpoints to keep")
    restarts: int = Field(
        default=3,
        ge=0,
        description=("how often a run restarts from its latest checkpoint when a process dies"),
    )
    keep_every: int = Field(
        default=0,
        ge=0,
        description="also keep checkpoints whose step is a multiple of this; 0: none",
    )
    keep_best: bool = Field(
        default=False,
        description=(
            "after a validation whose loss is the lowest so far, save a checkpoint, and keep it"
            " until a lower one (docs/checkpoints.md)"
        ),
    )


class PipelineConfig(CallableTable):
    """[pipeline]"""

    schedule: str = Field(
        default=DEFAULT_SCHEDULE,
        description=(
            'a schedule of docs/schedules.md, or "package.module:callable" that makes one'
        ),
    )
    cut: str | Strings = Field(
        default="parameters",
        description=(
            "what stages balance: parameters, flops or time; or a list of the modules with which"
            " the later stages begin"
        ),
    )
    dynamic_shapes: bool = Field(
        default=False,
        description="shapes between stages depend on values, not only on the shapes of the batch",
    )


class SyncConfig(CallableTable):
    """[sync]"""

    name: str = Field(
        default="allreduce", description="synchroniser of the replicas on dp: docs/sync.md"
    )
    codec: str | dict[str, Any] = Field(
        default="identity",
        description=(
            "compression of messages: a name of docs/codecs.md, or a table such as"
            ' { name = "powersgd", rank = 8 }'
        ),
    )


class RunConfig(TomlTable):
    """A run file. Modules and relative paths are looked up in `folder`, then in the current
    directory."""

    model: ModelConfig
    data: DataConfig
    layout: LayoutConfig = LayoutConfig()
    train: TrainConfig
    lr_schedule: LRScheduleConfig = LRScheduleConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    pipeline: PipelineConfig = PipelineConfig()
    sync: SyncConfig = SyncConfig()
    roles: dict[str, Any] = Field(
        default={}, description='glob of module names -> role, as in "blocks.*.up" = "column"'
    )
    workers: dict[str, Strings] = Field(
        default={},
        description=('worker -> modules that live there, globs allowed, as in big = ["blocks.*"]'),
    )
    output: str = Field(min_length=1, description="run folder (default: runs/NAME for NAME.toml)")
    folder: str = Field(
        min_length=1,
        description="where modules and relative paths are found (default: the run file's folder)",
    )

    @field_validator("output")
    @classmethod
    def _a_folder(cls, value: str) -> str:
        if "://" in value:
            fix = "name a folder that all hosts see, and copy it to the address afterwards"
            raise table_error("is an address, and a run writes to a folder", fix)
        return value

    @model_validator(mode="after")
    def _one_schedule(self) -> Self:
        for name in RATE_KEYS if self.lr_schedule.build is not None else ():
            if (value := getattr(self.train, name)) != TrainConfig.model_fields[name].default:
                problem = "has no effect where [lr_schedule] names a schedule"
                raise table_error(problem, "leave one of them out", **{f"train.{name}": value})
        return self

    @property
    def loss(self) -> str:
        """[train] loss, or its default: weft.data shifts labels, and transformers does not."""
        if self.train.loss is not None:
            return self.train.loss
        causal = self.model.hf is not None and self.model.auto in (None, "causal-lm")
        shifted = all(
            source.build is None or source.build.startswith("weft.data:")
            for source in self.data.blend or (self.data,)
        )
        return "weft.losses:causal_lm" if causal and not shifted else DEFAULT_LOSS

    def with_steps(self, steps: int) -> Self:
        """The same run with so many steps in place of epochs. Raises ConfigError."""
        tables = self.model_dump()
        tables["train"] |= {"steps": steps, "epochs": None}
        try:
            return self.model_validate(tables)
        except ValidationError as error:
            raise toml_refusal(error, RunConfig, "run file") from None

    @property
    def world(self) -> int:
        """Number of processes: the layout's ranks, or a driver and its workers."""
        return 1 + len(self.workers) if self.workers else self.layout.axes.world


def load_run(path: str | Path, overrides: Mapping[str, str] | None = None) -> RunConfig:
    """Read a run file. `overrides`: dotted key -> TOML value, or text that is no TOML value and
    counts as a string.

    Raises ConfigError with the dotted key as its field; LayoutError for a layout that does not
    parse.
    """
    path = Path(path)
    text = ""
    try:
        text = read_file(path).decode("utf-8-sig")  # some editors begin a file with a mark
        tables = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError("run file", str(path), "there is no such file", _beside(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or error  # without the number of a handle
        problem, fix = f"cannot be read ({said})", "name a TOML file, in UTF-8"
        raise ConfigError("run file", str(path), problem, fix) from None
    except (ValueError, RecursionError) as error:  # of TOML, its numbers, or its depth
        problem, fix = toml_problem(text, error), toml_fix(text, error)
        raise ConfigError("run file", str(path), problem, fix) from None
    for key, value in (overrides or {}).items():
        _override(tables, key, value)
    tables.setdefault("output", f"runs/{path.stem}")
    here = path.resolve().parent
    folder = tables.get("folder", ".")
    tables["folder"] = (
        str(here / folder) if isinstance(folder, str) and folder != "." else str(here)
    )
    try:
        return RunConfig.model_validate(tables)
    except ValidationError as error:
        raise toml_refusal(error, RunConfig, "run file") from None


def table_keys(table: str) -> Collection[str]:
    """The keys that a table of the run file has of its own, beside arguments of what it names."""
    found = RunConfig.model_fields.get(table)
    return getattr(found.annotation, "model_fields", ()) if found is not None else ()


# ---- overrides and hints -------------------------------------------------------------------------


def _override(tables: dict[str, Any], key: str, text: str) -> None:
    """Set the dotted key in the tables."""
    try:
        nested = tomllib.loads(f"{key} = 0")
    except (ValueError, RecursionError):
        fix = "write --set table.key=value"
        raise ConfigError("--set", key, "is not a dotted key", fix) from None
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        parsed = {}
    if not parsed and (text[:1], text[-1:]) in (("[", "]"), ("{", "}")):
        problem = "is not TOML; a shell takes quotes away, unless the whole is quoted"
        raise ConfigError("--set", f"{key}={text}", problem, """write as in --set 'a.b=["c"]'""")
    value = parsed["value"] if len(parsed) == 1 else text
    table = tables
    while True:
        [(name, rest)] = nested.items()
        if not isinstance(rest, dict):
            table[name] = value
            return
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            problem = f"{name} is a value, not a table"
            raise ConfigError("--set", key, problem, "name a key of a table")
        nested = rest


def _beside(path: Path) -> str:
    found = sorted(p.name for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
    return nearest(path.name, found) if found else "name a TOML file that exists"
