"""What a Plan is made from: a model, a layout, and how to train under it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.core import BLOCKS, Layout, PipelineRequest, Sync
from weft.nn import model_arguments, named_inputs


@dataclass(frozen=True)
class PlanRequest:
    """A model, a layout, and how to train under it; `weft.plan` says what each field means.

    `make_plan.plan_from_request` makes the Plan.
    """

    model: nn.Module
    layout: Layout
    batch: int
    accumulate: int = 1
    loss: Callable | None = None
    roles: Mapping[str, object] | None = None
    recompute: str | int | tuple[str, ...] = "none"
    precision: str = "fp32"
    reduce: str = "fp32"
    sync_batchnorm: bool = True
    pipeline: PipelineRequest = field(default_factory=PipelineRequest)
    inputs: Sequence[str] | None = None
    sample: Mapping[str, Tensor] | None = None
    sync: Sync | None = None
    logits: str = "auto"
    fsdp_prefetch: int | None = None
    offload_activations: bool = False
    float8: str = "off"
    parts: Mapping[str, str] = field(default_factory=dict)
    fsdp_units: str | int | tuple[str, ...] = BLOCKS
    records: list[Any] = field(default_factory=list, compare=False, repr=False)  # `record_forward`

    @property
    def samples(self) -> int:
        """How many samples its sample has; 0: it has none."""
        return len(next((t for t in (self.sample or {}).values() if t.ndim), ()))

    def with_samples(self, number: int) -> PlanRequest:
        """The request with so many samples, those of its own in turn."""

        def rows(t: Tensor) -> Tensor:
            return t[torch.arange(len(t) * number // self.samples) % len(t)] if t.ndim else t

        return replace(self, sample={k: rows(t) for k, t in (self.sample or {}).items()})

    def with_twice_the_samples(self) -> PlanRequest:
        """The request with its sample two times over: what grows counts samples."""
        return self.with_samples(2 * self.samples)

    def arguments(self) -> dict[str, Any]:
        """What the model's forward is called with for the sample."""
        names = self.inputs if self.inputs is not None else named_inputs(self.model)
        return model_arguments(names, dict(self.sample or {}))
