"""Links: what one slow link costs, by the axis whose messages it carries and its place in a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from ..costs import Costs
from ..simulate import simulate
from .setup import Setup, Step


def each(setup: Setup, axis: str, factor: float) -> Iterator[tuple[str, float, float]]:
    """Name, seconds of a step and idle share with one link of this axis so much slower, in each of its places: between
    two stages, or in a stage of one pipeline; or of those that sum gradients. Raises ConfigError."""
    planned, slow = setup.step(), setup.step(links={axis: factor})
    name, ranks = f"a link of {axis} x{factor:g}", setup.size("pp")
    if axis == "pp":
        on = setup.schedule.placement
        ends = [i for i in range(setup.schedule.stages - 1) if on[i] != on[i + 1]]
        places = [(f"{name}, after stage {i}", i) for i in ends]
    elif slow.costs == planned.costs:
        places = [(name, -1)]
    else:
        places = [(setup.on_stages(name, rank), rank) for rank in range(ranks)]
    busy = sum(lane.work_s for lane in simulate(setup.schedule, planned.costs).lanes) / ranks
    for title, place in places:
        acted = simulate(setup.schedule, _mixed(setup, planned.costs, slow, axis, place)).makespan_s
        total = acted + slow.after_s
        yield title, total, (acted - busy) / total


def first(setup: Setup, planned: Step, slow: Step, axes: Iterable[str]) -> Costs:
    """The costs of a pipeline whose first link of each of these axes is slow: in or after its first stage."""
    costs = planned.costs
    for axis in axes:
        costs = _mixed(setup, costs, slow, axis, 0)
    return costs


def _mixed(setup: Setup, costs: Costs, slow: Step, axis: str, place: int) -> Costs:
    """The costs of a pipeline of which one place, a boundary of pp or else a rank, has those of `slow`."""
    messages = axis == "pp"
    places = range(setup.schedule.stages - 1) if messages else setup.schedule.placement
    mixed: dict[str, Any] = {}
    for field in ("comm_s",) if messages else ("forward_s", "backward_s", "weight_s"):
        pairs = zip(costs.each(field, len(places)), slow.costs.each(field, len(places)))
        mixed[field] = tuple(b if at == place else a for at, (a, b) in zip(places, pairs))
    return replace(costs, **mixed)
