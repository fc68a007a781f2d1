"""What is verified: a model, its batches, its loss and its optimizer, as functions that any process
can call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.core import CompileChoice, CompileOptions, Plan
from weft.engine import Float64Mode, Loss, Optimizers
from weft.nn import deferred_init
from weft.train import in_dtype

from .difference import BOUNDS, Bounds

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """`build` makes the seeded model, and `plan(model, layout)` lays it, in `precision`: "fp64",
    "bf16" or "fp16", whose masters are float32, or "float8", where linears multiply in it beside
    bf16.

    `batch(step, data_rank, data_size)`: one rank's part of the global batch of a step.
    `whole_batch(step)`: all of it, read apart from what `batch` does; default: by `batch`.
    `faults()`: what is wrong with what both sides are given: the order of samples, the settings of
    the optimizer. `hang_s`: seconds without a step that are a hang; None: it follows from how long
    the reference takes. `workers`: where modules live. `build_deferred` makes the same model
    without weights; default: by `build`. `frozen`: globs of parameters that are not trained;
    `build` freezes them too.
    `build_plain` makes it for one device, apart from what `build` does; default: by `build`.
    `compile`: as of an Engine. `within`: what counts as equal; default: what does in `precision`.
    """

    build: Callable[[], nn.Module]
    plan: Callable[[nn.Module, str], Plan]
    batch: Callable[[int, int, int], Batch]
    loss: Loss
    optimizer: Optimizers
    inputs: tuple[str, ...] | None = None
    clip: float | None = None
    seed: int = 0
    workers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    build_deferred: Callable[[], nn.Module] | None = None
    build_plain: Callable[[], nn.Module] | None = None
    compile: CompileChoice | CompileOptions = "off"
    precision: str = "fp64"
    whole_batch: Callable[[int], Batch] | None = None
    faults: Callable[[], Sequence[str]] = tuple
    hang_s: float | None = None
    within: Bounds | None = None
    frozen: Sequence[str] = ()

    @property
    def bounds(self) -> Bounds:
        """What counts as equal."""
        return self.within or BOUNDS[self.precision]

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters that the optimizer updates."""
        return torch.float64 if self.precision == "fp64" else torch.float32

    def model(self) -> nn.Module:
        """The seeded model, in the dtype that is verified."""
        return in_dtype(self.build(), self.dtype)

    def plain_model(self) -> nn.Module:
        """The same as one device trains it, in training mode."""
        return in_dtype((self.build_plain or self.build)(), self.dtype).train()

    def without_weights(self) -> nn.Module:
        """The model as ranks begin with it. Raises UnsupportedModel."""
        if self.build_deferred is not None:
            return self.build_deferred()
        return deferred_init(self.model, seed=None)

    def mode(self) -> AbstractContextManager[Any]:
        """Active where the model runs: what it casts to float32 stays float64."""
        return mode_of(self.precision)

    def lay(self, model: nn.Module, layout: str) -> Plan:
        """`plan`, of a model which may have to run for it."""
        with self.mode():
            return self.plan(model, layout)

    def batch_of(self, step: int, data_rank: int, data_size: int) -> Batch:
        """`batch`, in the dtype that is verified."""
        found = self.batch(step, data_rank, data_size)
        return to_float64(found) if self.precision == "fp64" else found

    def whole_batch_of(self, step: int) -> Batch:
        """`whole_batch`, in the dtype that is verified."""
        if self.whole_batch is None:
            return self.batch_of(step, 0, 1)
        found = self.whole_batch(step)
        return to_float64(found) if self.precision == "fp64" else found


def mode_of(precision: str) -> AbstractContextManager[Any]:
    """Active where a run that is verified in this precision makes tensors."""
    return Float64Mode() if precision == "fp64" else nullcontext()


def to_float64(batch: Mapping[str, Any]) -> Batch:
    """Floating-point entries in float64."""
    return {
        key: value.double() if value.is_floating_point() else value for key, value in batch.items()
    }
