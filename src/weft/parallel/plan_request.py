"""What a Plan is made from: a model, a layout, and how to train under it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from weft.core import Layout, PipelineRequest, Sync


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
    recompute: str | int = "none"
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
