"""How a user wants a pipeline to be cut and scheduled. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .schedule import DEFAULT_SCHEDULE, Schedule


@dataclass(frozen=True)
class PipelineRequest:
    """The pipeline that a user asks for.

    Attributes:
        schedule: A name, a Schedule, or a function (ranks, microbatches, **options) -> Schedule. An
            option of `pp` in the layout overrides it.
        options: Further arguments of the schedule, such as `chunks`, the stages per rank.
        cut: What the stages balance: "parameters", "flops" or measured "time"; or the modules with
            which the second and later stages begin.
        dynamic_shapes: Whether shapes between stages depend on values, not only on batch shapes.
    """

    schedule: str | Schedule | Callable[..., Schedule] = DEFAULT_SCHEDULE
    options: Mapping[str, Any] = field(default_factory=dict)
    cut: str | Sequence[str] = "parameters"
    dynamic_shapes: bool = False
