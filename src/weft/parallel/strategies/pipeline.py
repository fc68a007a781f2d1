"""Pipeline parallel over `pp`: ranks hold successive stages of the model, and microbatches go
through them.

It asks nothing of a module: which module is of which stage is the plan's `staging`, the order of
the work its schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.core import AxisTraits, Divides, Step
from weft.pipeline import schedules

from ._request import StepsRequest

AXIS = "pp"
TRAITS = AxisTraits(frozenset({Divides.STAGES}), order=0)
OPTIONS: Mapping[str, str] = {name: f"the schedule {name}" for name in schedules.registry()}


def steps(request: StepsRequest) -> Iterator[Step]:
    """None."""
    return iter(())
