"""Pipeline parallel over `pp`: ranks hold successive stages of the model, and microbatches go
through them.

It asks nothing of a module: which module is of which stage is the plan's `staging`, the order of
the work its schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from weft.core import Layout, Step, Weight
from weft.nn import Roles
from weft.pipeline import schedules

AXIS = "pp"
OPTIONS: Mapping[str, str] = {name: f"the schedule {name}" for name in schedules.registry()}


def steps(
    model: nn.Module, weights: Sequence[Weight], roles: Roles, layout: Layout, sharded_logits: bool
) -> Iterator[Step]:
    """None."""
    return iter(())
