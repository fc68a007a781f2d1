"""What is verified: a model, its batches, its loss and its optimizer, as functions that any process
can call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from weft.core import CompileChoice, CompileOptions, Plan
from weft.engine import Loss, Optimizers
from weft.nn import deferred_init

from .float64_mode import Float64Mode

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """`build` makes the seeded model in float64. `plan(model, layout)` lays it.

    `batch(step, data_rank, data_size)`: one rank's part of the global batch of a step. `workers`:
    where modules live. `build_deferred` makes the same model without weights; default: by `build`.
    `compile`: as of an Engine.
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
    compile: CompileChoice | CompileOptions = "off"

    def without_weights(self) -> nn.Module:
        """The model in float64 as ranks begin with it. Raises UnsupportedModel."""
        if self.build_deferred is not None:
            return self.build_deferred()
        return deferred_init(lambda: self.build().double(), seed=None)

    def plan_in_float64(self, model: nn.Module, layout: str) -> Plan:
        """`plan`, of a model in float64, which may have to run for it."""
        with Float64Mode():
            return self.plan(model, layout)


def to_float64(batch: Mapping[str, Any]) -> Batch:
    """Floating-point entries in float64."""
    return {
        key: value.double() if value.is_floating_point() else value for key, value in batch.items()
    }
