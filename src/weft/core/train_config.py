"""The table [train] of a run file. Pure data; no torch."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from .compile_options import CompileChoice, CompileMode, CompileOptions
from .errors import nearest
from .toml import AS_TUPLE, Strings, TomlTable, table_error

# names, or tables with a name and arguments
NamedTables = Annotated[tuple[str | dict[str, Any], ...], AS_TUPLE]
# of torch.distributed, as it writes them
BackendChoice = Literal["auto", "gloo", "nccl", "cpu:gloo,cuda:nccl"]


class TrainConfig(TomlTable):
    """[train]"""

    batch: int = Field(gt=0, description="samples per optimizer step, over all ranks")
    # None only beside epochs, until the data are there: see weft.train.count_steps
    steps: int = Field(  # type: ignore[assignment]
        default=None, gt=0, description="number of optimizer steps (required without `epochs`)"
    )
    epochs: float | None = Field(
        default=None,
        gt=0,
        description="passes over the data, in place of `steps`; a last, smaller batch is left out",
    )
    accumulate: int = Field(
        default=1, gt=0, description="number of microbatches that the batch is divided into"
    )
    loss: str | None = Field(
        default=None,
        description=(
            '"package.module:callable" that maps (output, batch) to (sum, weight) (default:'
            ' "weft.losses:causal_lm" for a causal language model of transformers whose data is not'
            ' weft.data, else "weft.losses:next_token")'
        ),
    )
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="seed of weights, data order and dropout"
    )
    clip: float | None = Field(
        default=None, gt=0, description="largest global gradient norm (default: no clipping)"
    )
    skip: float | None = Field(
        default=None,
        gt=1,
        description=(
            "skip a step whose gradient norm is not finite, or exceeds this many times the median"
            " of the last 64"
        ),
    )
    rollback: float | None = Field(
        default=None,
        gt=1,
        description=(
            "return to the latest checkpoint and leave out the samples since, when a loss is not"
            " finite or exceeds this many times the median of the last 64"
        ),
    )
    warmup: int = Field(
        default=0, ge=0, description="steps over which the learning rate rises to lr"
    )
    warmup_shape: Literal["linear", "cosine"] = Field(
        default="linear", description="how the learning rate rises"
    )
    start_lr_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="the rate from which warm-up starts, as a fraction of lr",
    )
    decay: Literal["constant", "linear", "cosine", "sqrt"] = Field(
        default="constant",
        description=(
            "how the learning rate falls (WSD, one-cycle and functions of your own:"
            " docs/optimizers.md)"
        ),
    )
    decay_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description=(
            "the last share of all steps, in which the learning rate falls (default: all steps"
            " after warm-up)"
        ),
    )
    min_lr_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="final learning rate, as a fraction of lr",
    )
    ema: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description=(
            "keep an exponential moving average of the weights, of which this share stays in each"
            " step; validation uses it (docs/optimizers.md)"
        ),
    )
    ema_warmup: bool = Field(
        default=False,
        description="in step n at most (1 + n) / (10 + n) of the average stays",
    )
    eval_every: int = Field(default=0, ge=0, description="steps between validations; 0: never")
    eval_batches: int = Field(default=8, gt=0, description="batches per validation")
    eval_metrics: Strings = Field(
        default=(),
        description=(
            'functions of (output, batch) that return (sum, weight), as in ["mine:accuracy"]: their'
            " means over a validation are logged as val_NAME (docs/metrics.md)"
        ),
    )
    log_every: int = Field(default=10, gt=0, description="steps between lines of metrics")
    callbacks: NamedTables = Field(
        default=(),
        description=(
            'classes that are called while the run trains, as in ["package.module:Name", { name ='
            ' "weft.callbacks:EarlyStopping", patience = 5 }] (docs/watching.md)'
        ),
    )
    loggers: NamedTables | None = Field(
        default=None,
        description=(
            "where metrics go beside metrics.jsonl: tensorboard, csv, wandb, mlflow, as in"
            ' ["csv", { name = "wandb", project = "mine" }] (docs/watching.md); default:'
            " tensorboard where it is installed"
        ),
    )
    profile: str | None = Field(
        default=None,
        description=(
            'steps to record with torch.profiler, as in "10-12": profile.json in the run folder has'
            " all ranks (docs/watching.md)"
        ),
    )
    memory_snapshot: int | None = Field(
        default=None,
        gt=0,
        description=(
            "step after which each rank writes what its GPU's memory holds and what allocated it,"
            " for pytorch.org/memory_viz; also where memory runs out before (docs/watching.md)"
        ),
    )
    recompute: str | int | tuple[str, ...] = Field(
        default="none",
        description=(
            'activation recomputation: "none", "selective" (attention), "full", k: every k-th'
            ' block, or globs of modules, as in ["blocks.0", "blocks.1?"]'
        ),
    )
    logits: Literal["auto", "whole", "chunks"] = Field(
        default="auto",
        description=(
            'logits: "whole"; "chunks": computed by the loss for some tokens at a time, and'
            ' again in backward; "auto": chunks where a microbatch has more than 64 million'
        ),
    )
    offload_activations: bool = Field(
        default=False,
        description=(
            "keep what blocks save for backward in pinned host memory between forward and"
            " backward; needs GPUs"
        ),
    )
    fsdp_prefetch: int | None = Field(
        default=None,
        gt=0,
        description=(
            "units whose weights `fsdp` gathers ahead of the one that runs, in forward and"
            " backward; default: as FSDP2 does by itself"
        ),
    )
    compile: CompileChoice = Field(
        default="auto",
        description=(
            'compile each block and the loss by torch.compile: "blocks", "off", or "auto": on CUDA'
            " where blocks repeat"
        ),
    )
    compile_mode: CompileMode = Field(default="default", description="mode of torch.compile")
    compile_backend: str = Field(default="inductor", description="backend of torch.compile")
    async_tp: bool = Field(
        default=False,
        description=(
            "overlap the collectives of tp+sequence with matmuls; needs compiled blocks, and GPUs"
            " that share memory"
        ),
    )
    sample_tokens: int = Field(default=0, ge=0, description="tokens to generate after training")
    prompt: str = Field(default="", description="start of the generated text")
    hang_s: float | None = Field(
        default=None,
        ge=0,
        description=(
            "seconds without a step after which a run reports where it hangs and ends; 0: never"
            " (default: 20 times the slowest of the last steps, at least 60; 600 where replicas"
            " step by themselves, and for first steps, checkpoints and callbacks); a checkpoint and"
            " a callback may take ten times as long, up to 600; before the first step ranks wait"
            " for one another ten times as long, or 600"
        ),
    )
    backend: BackendChoice = Field(
        default="auto",
        description=(
            'how ranks communicate: "gloo", on the CPU; "nccl", or "cpu:gloo,cuda:nccl", the same,'
            ' with a GPU for each rank; "auto": nccl where there are enough GPUs'
        ),
    )
    threads: int | None = Field(
        default=None,
        gt=0,
        description="torch threads per process (default: OMP_NUM_THREADS, or cores // processes)",
    )
    sync_batchnorm: bool = Field(
        default=True,
        description="batch-norm statistics cover the whole microbatch, not one rank's part",
    )

    @property
    def compile_options(self) -> CompileChoice | CompileOptions:
        """What an Engine takes as `compile`."""
        if self.compile == "blocks":
            return CompileOptions(self.compile_mode, self.compile_backend, self.async_tp)
        return self.compile

    @property
    def profiled_steps(self) -> range:
        """The steps of `profile`."""
        first, _, last = (self.profile or "1-0").partition("-")
        return range(int(first), int(last or first) + 1)

    @field_validator("profile")
    @classmethod
    def _profile(cls, value: str | None) -> str | None:
        found = re.fullmatch(r"(\d{1,12})(?:-(\d{1,12}))?", "1" if value is None else value)
        if found and 0 < int(found[1]) <= int(found[2] or found[1]):
            return value
        raise table_error(
            "is neither one step nor a range of steps", 'write one step or two, as in "10-12"'
        )

    @field_validator("recompute", mode="before")
    @classmethod
    def _recompute(cls, value: object) -> object:
        if value in ("none", "selective", "full") or (type(value) is int and value > 0):
            return value
        if isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value):
            return tuple(value)
        hint = (
            nearest(value, ("none", "selective", "full"))
            if isinstance(value, str)
            else "count from 1"
        )
        raise table_error(
            "is not a way to recompute",
            f'write "none", "selective", "full", a number of blocks, or a list of modules; {hint}',
        )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.steps is None and self.epochs is None:
            raise table_error("is missing", "write steps, as in 1000, or epochs", steps=None)
        if self.steps is not None and self.epochs is not None:
            raise table_error("is given beside steps", "leave one of them out", epochs=self.epochs)
        if self.batch % self.accumulate:
            fix = f"use a multiple of {self.accumulate}"
            raise table_error(
                f"does not divide into accumulate = {self.accumulate} microbatches",
                fix,
                batch=self.batch,
            )
        if self.compile != "blocks":
            for name, default in (
                ("compile_mode", "default"),
                ("compile_backend", "inductor"),
                ("async_tp", False),
            ):
                if (value := getattr(self, name)) != default:
                    fix = f'set compile = "blocks", or leave {name} out'
                    raise table_error(
                        f"has no effect with compile = {self.compile!r}", fix, **{name: value}
                    )
        for name, last, value in (
            ("profile", self.profiled_steps.stop - 1, self.profile),
            ("memory_snapshot", self.memory_snapshot or 0, self.memory_snapshot),
        ):
            if self.steps is not None and last > self.steps:
                fix = f"name steps up to {self.steps}"
                raise table_error("goes beyond the last step", fix, **{name: value})
        if self.ema_warmup and self.ema is None:
            fix = "write ema, as in 0.999, or leave it out"
            raise table_error("has no effect without ema", fix, ema_warmup=True)
        _check_schedule(self)
        return self


def _check_schedule(train: TrainConfig) -> None:
    """Raises table_error's ValueError for keys of the learning rate that do not go together."""
    if train.steps is not None and train.warmup > train.steps:
        raise table_error(
            "is longer than the whole run",
            f"use at most steps = {train.steps}, as in --set train.warmup=0 for a short trial",
            warmup=train.warmup,
        )
    if train.decay == "constant" and train.decay_share is not None:
        fix = 'write decay, as in "linear", or leave decay_share out'
        problem = "has no effect with decay = 'constant'"
        raise table_error(problem, fix, decay_share=train.decay_share)
    for name, default in (("warmup_shape", "linear"), ("start_lr_ratio", 0.0)):
        if not train.warmup and (value := getattr(train, name)) != default:
            fix = f"write warmup, the number of steps that it has, or leave {name} out"
            raise table_error("has no effect without warmup", fix, **{name: value})
    if train.steps is None or train.decay_share is None:
        return
    if (falls := round(train.decay_share * train.steps)) + train.warmup > train.steps:
        problem = (
            f"is {falls} of {train.steps} steps, and warmup has {train.warmup}: more than the run"
        )
        fix = "use a smaller share, or leave decay_share out for all steps after warm-up"
        raise table_error(problem, fix, decay_share=train.decay_share)
