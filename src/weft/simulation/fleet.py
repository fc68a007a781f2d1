"""Fleet: one schedule on many pipelines at once, each of its ranks at a pace of its own, as vectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..cost.choices import Array
from ..costs import Costs
from ..schedules import Action, Schedule
from ..simulate import Row, rows, simulate, split

CELLS = 4_000_000  # ends of actions that are held at once


@dataclass(frozen=True)
class Run:
    """One action of the order in which all run: on which rank, for which of the prices, what it needs, and where its
    own end is held until the last that needs it has begun."""

    rank: int
    of: tuple[str, int]  # kind as in `rows`, stage
    needs: tuple[tuple[int, float], ...]  # place of an end, lag
    place: int


class Fleet:
    """A schedule, and what its stages cost on devices of some paces; for a pace between two, on the line between."""

    def __init__(self, schedule: Schedule, priced: Mapping[float, Costs]):
        self._points = np.array(sorted(priced))
        found = [rows(schedule, priced[pace]) for pace in sorted(priced)]
        self._schedule, self._order = schedule, _order(schedule, found[0])
        self._seconds = {
            (key, stage): np.array([one[key][stage][1] for one in found])
            for key, stages in found[0].items()
            for stage in range(len(stages))
        }
        self._places = 1 + max(run.place for run in self._order)

    @property
    def actions(self) -> int:
        """Of one pipeline."""
        return len(self._order)

    def ends(self, paces: Array) -> Array:
        """[pipelines, ranks] paces -> when each of these ranks ends its last action, in seconds from the first start.

        Pipelines that are equal are simulated once.
        """
        distinct, place = np.unique(paces, axis=0, return_inverse=True)
        size = max(1, CELLS // self._places)
        found = [self._ends(distinct[first : first + size]) for first in range(0, len(distinct), size)]
        return np.concatenate(found)[place.reshape(-1)]

    def busy(self, rank: int, paces: Array) -> Array:
        """Seconds of the actions of one rank on devices of these paces."""
        total = np.zeros(len(self._points))
        for run in self._order:
            if run.rank == rank:
                total = total + self._seconds[run.of]
        return np.interp(paces, self._points, total)

    def _ends(self, paces: Array) -> Array:
        seconds = {
            of: np.interp(paces[:, self._schedule.placement[of[1]]], self._points, priced)
            for of, priced in self._seconds.items()
        }
        ends = np.empty((self._places, len(paces)))
        free = np.zeros((self._schedule.ranks, len(paces)))
        for run in self._order:
            start = free[run.rank]
            for need, lag in run.needs:
                np.maximum(start, ends[need] + lag if lag else ends[need], out=start)
            start += seconds[run.of]
            ends[run.place] = start
        return free.T


def _order(schedule: Schedule, costs: Mapping[str, list[Row]]) -> list[Run]:
    """All actions, each after those that it needs, with places for their ends that are used again."""
    apart = split(schedule)
    timeline = simulate(schedule, Costs(update_s=1.0))  # each takes its time, so none starts with what it needs
    starts = [
        (start, rank, label)
        for rank, lane in enumerate(timeline.lanes)
        for label, start, _ in lane.spans
        if isinstance(label, Action)
    ]
    actions = [(rank, action) for _, rank, action in sorted(starts, key=lambda each: each[0])]
    last = {need: i for i, (_, action) in enumerate(actions) for need in schedule.needs(action)}
    held: dict[Action, int] = {}
    unused: list[int] = []
    order = []
    for i, (rank, action) in enumerate(actions):
        kind, stage, microbatch = action
        key = "b" if kind == "B" and (stage, microbatch) in apart else kind
        needs = list(schedule.needs(action))
        places = tuple((held[need], lag) for need, (_, lag) in zip(needs, costs[key][stage][2], strict=True))
        unused += [held.pop(need) for need in needs if last[need] == i]
        held[action] = unused.pop() if unused else len(held)
        order.append(Run(rank, (key, stage), places, held[action]))
        if action not in last:
            unused.append(held.pop(action))
    return order
