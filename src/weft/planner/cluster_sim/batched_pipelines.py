"""Simulates one schedule on many pipelines at once, as vectors; each rank has a speed of its
own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from weft.core import Action, ActionCosts, Schedule
from weft.pipeline import cost_rows, simulate, split_backwards

from ..cost.layout_batch import Array

CELLS = 4_000_000  # ends of actions that are held at once


@dataclass(frozen=True)
class OrderedAction:
    """One action of the order in which all run: on which rank, for which of the prices, where the
    ends of what it needs are held, and where its own is, until the last that needs it has begun."""

    rank: int
    of: tuple[str, int]  # kind as in `rows`, stage
    needs: tuple[int, ...]
    place: int


class BatchedPipelines:
    """A schedule, and what its stages cost on devices of some paces; for a pace between two, on the
    line between."""

    def __init__(self, schedule: Schedule, priced: Mapping[float, ActionCosts]):
        self._points = np.array(sorted(priced))
        found = [cost_rows(schedule, priced[pace]) for pace in sorted(priced)]
        self._schedule, self._order = schedule, action_order(schedule)
        every = [(key, stage) for key, stages in found[0].items() for stage in range(len(stages))]
        self._seconds = {of: np.array([one[of[0]][of[1]][1] for one in found]) for of in every}
        self._lags = {of: [lag for _, lag in found[0][of[0]][of[1]][2]] for of in every}
        self._busy = np.zeros((schedule.ranks, len(self._points)))
        for run in self._order:
            self._busy[run.rank] += self._seconds[run.of]
        self._places = 1 + max(run.place for run in self._order)

    @property
    def actions(self) -> int:
        """Of one pipeline."""
        return len(self._order)

    def ends(self, paces: Array) -> Array:
        """[pipelines, ranks] paces -> when each of these ranks ends its last action, in seconds
        from the first start.

        Pipelines that are like the first are simulated with it.
        """
        others = (paces != paces[0]).any(axis=1)
        some = np.concatenate([paces[:1], paces[others]])
        size = max(1, CELLS // self._places)
        found = np.concatenate(
            [self._ends(some[first : first + size]) for first in range(0, len(some), size)]
        )
        ends = np.broadcast_to(found[0], paces.shape).copy()
        ends[others] = found[1:]
        return ends

    def busy(self, rank: int, paces: Array) -> Array:
        """Seconds of the actions of one rank on devices of these paces."""
        return np.interp(paces, self._points, self._busy[rank])

    def _ends(self, paces: Array) -> Array:
        seconds = {
            of: np.interp(paces[:, self._schedule.placement[of[1]]], self._points, priced)
            for of, priced in self._seconds.items()
        }
        ends = np.empty((self._places, len(paces)))
        free = np.zeros((self._schedule.ranks, len(paces)))
        for run in self._order:
            start = free[run.rank]
            for need, lag in zip(run.needs, self._lags[run.of]):
                np.maximum(start, ends[need] + lag if lag else ends[need], out=start)
            start += seconds[run.of]
            ends[run.place] = start
        return free.T


@lru_cache(maxsize=4)
def action_order(schedule: Schedule) -> tuple[OrderedAction, ...]:
    """All actions, each after those that it needs, with places for their ends that are used
    again."""
    apart = split_backwards(schedule)
    timeline = simulate(
        schedule, ActionCosts(update_s=1.0)
    )  # each takes its time, so none starts with what it needs
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
    found = []
    for i, (rank, action) in enumerate(actions):
        kind, stage, microbatch = action
        needs = list(schedule.needs(action))
        places = tuple(held[need] for need in needs)
        unused += [held.pop(need) for need in needs if last[need] == i]
        held[action] = unused.pop() if unused else len(held)
        key = "b" if kind == "B" and (stage, microbatch) in apart else kind
        found.append(OrderedAction(rank, (key, stage), places, held[action]))
        if action not in last:
            unused.append(held.pop(action))
    return tuple(found)
