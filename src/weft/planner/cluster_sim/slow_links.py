"""What one slow link costs, by the axis whose messages it carries and its place in a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from weft.core import (
    STAGE_AXIS,
    ActionCosts,
)
from weft.pipeline import simulate

from .scenario import Scenario, StepParts


def slow_link_cost(setup: Scenario, axis: str, factor: float) -> Iterator[tuple[str, float, float]]:
    """Name, seconds of a step and idle share with one link of this axis so much slower, in each of
    its places: between two stages, or in a stage of one pipeline; or of those that sum gradients.
    Raises ConfigError."""
    planned, slow = setup.step(), setup.step(links={axis: factor})
    name, ranks = f"a link of {axis} x{factor:g}", setup.size(STAGE_AXIS)
    if axis == STAGE_AXIS:
        places = [
            (
                f"{name}, after {'stages' if len(ends) > 1 else 'stage'}"
                f" {' and '.join(map(str, ends))}",
                ends,
            )
            for ends in _between(setup)
        ]
    elif slow.costs == planned.costs:
        places = [(name, ())]
    else:
        places = [(setup.on_stages(name, rank), (rank,)) for rank in range(ranks)]
    busy = sum(lane.work_s for lane in simulate(setup.schedule, planned.costs).lanes) / ranks
    for title, place in places:
        acted = simulate(
            setup.schedule, _mix_costs(setup, planned.costs, slow, axis, place)
        ).makespan_s
        total = acted + slow.after_s
        yield title, total, (acted - busy) / total


def slow_first_link(
    setup: Scenario, planned: StepParts, slow: StepParts, axes: Iterable[str]
) -> ActionCosts:
    """The costs of a pipeline whose first link of each of these axes is slow: in or after its first
    stage."""
    costs = planned.costs
    for axis in axes:
        costs = _mix_costs(
            setup, costs, slow, axis, _between(setup)[0] if axis == STAGE_AXIS else (0,)
        )
    return costs


def _between(setup: Scenario) -> list[tuple[int, ...]]:
    """Of each two ranks that are neighbours in the pipeline, the stages after which messages travel
    between them."""
    found: dict[frozenset[int], tuple[int, ...]] = {}
    for stage, pair in enumerate(pairwise(setup.schedule.placement)):
        if len(set(pair)) > 1:
            found[frozenset(pair)] = (*found.get(frozenset(pair), ()), stage)
    return list(found.values())


def _mix_costs(
    setup: Scenario, costs: ActionCosts, slow: StepParts, axis: str, where: Sequence[int]
) -> ActionCosts:
    """The costs of a pipeline of which these places, boundaries of pp or else ranks, have those of
    `slow`."""
    messages = axis == STAGE_AXIS
    places = range(setup.schedule.stages - 1) if messages else setup.schedule.placement
    mixed: dict[str, Any] = {}
    for field in ("comm_s",) if messages else ("forward_s", "backward_s", "weight_s"):
        pairs = zip(costs.each(field, len(places)), slow.costs.each(field, len(places)))
        mixed[field] = tuple(b if at in where else a for at, (a, b) in zip(places, pairs))
    return replace(costs, **mixed)
