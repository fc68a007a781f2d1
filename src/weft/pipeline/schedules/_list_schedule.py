"""List schedules: each rank starts the action that a rule puts first among those that can start."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ._scheduling_problem import KINDS, Orders, SchedulingProblem


@dataclass(frozen=True)
class DispatchRule:
    """How a list schedule chooses. `due[kind][stage]`: seconds at which microbatch 0's action is
    due, each later microbatch one `cycle` later. `live[stage]`: most microbatches in flight.
    `wait`: share of the soonest possible completion for which an action that is due earlier is
    waited for (0: a rank never idles by choice)."""

    due: tuple[tuple[float, ...], ...]
    cycle: float
    live: tuple[int, ...]
    wait: float


class ListSchedule:
    """A list schedule in the making: what has arrived where, and what each rank would start
    next."""

    def __init__(self, problem: SchedulingProblem, rule: DispatchRule):
        self.problem, self.rule = problem, rule
        stages, count = problem.stages, problem.microbatches
        # [kind][stage]: how many microbatches have begun, and when those that may begin could:
        # first in, first out.
        self.begun = [[0] * stages for _ in KINDS]
        self.arrived: list[list[list[float]]] = [[[] for _ in range(stages)] for _ in KINDS]
        self.arrived[0][0] = [0.0] * count
        self.free, self.used = [0.0] * problem.ranks, [0.0] * problem.ranks
        self.orders: Orders = [[] for _ in range(problem.ranks)]

    def run(self) -> tuple[float, Orders]:
        """The makespan in seconds, and the order of each rank."""
        placement, stages = self.problem.placement, self.problem.stages
        chosen = [self.choose(r) for r in range(self.problem.ranks)]
        while True:
            start, rank = min((c[0], r) for r, c in enumerate(chosen))
            if start == math.inf:
                return max(self.free), self.orders
            _, kind, stage = chosen[rank]
            self.begin(rank, start, kind, stage)
            chosen[rank] = self.choose(rank)
            other = stage + 1 if kind == 0 else stage - 1
            if kind < 2 and 0 <= other < stages and placement[other] != rank:
                chosen[placement[other]] = self.choose(placement[other])

    def choose(self, rank: int) -> tuple[float, int, int]:
        """(start, kind, stage) of what this rank does next as far as it knows; an infinite start if
        nothing."""
        problem, rule, free = self.problem, self.rule, self.free[rank]
        options, soonest, complete = [], math.inf, math.inf
        for kind in range(3):
            begun, arrived, due, seconds = (
                self.begun[kind],
                self.arrived[kind],
                rule.due[kind],
                problem.seconds[kind],
            )
            for stage in problem.stages_of[rank]:
                j = begun[stage]
                if j == len(arrived[stage]) or (kind == 0 and not self.admits(rank, stage)):
                    continue
                start = max(free, arrived[stage][j])
                soonest, complete = min(soonest, start), min(complete, start + seconds[stage])
                options.append((due[stage] + j * rule.cycle, start, kind, stage))
        latest = soonest + rule.wait * (complete - soonest)
        return min((o for o in options if o[1] <= latest), default=(0.0, math.inf, 0, 0))[1:]

    def admits(self, rank: int, stage: int) -> bool:
        """Whether this rank may take another activation. One microbatch, the oldest that has not
        passed all of the rank's stages, may use all memory; others leave it what it still needs, so
        that it always finishes."""
        begun, own, size = self.begun[0], self.problem.stages_of[rank], self.problem.size
        if begun[stage] - self.begun[1 + self.problem.split][stage] >= self.rule.live[stage]:
            return False
        oldest = min(begun[s] for s in own)
        others = sum(size[s] for s in own if begun[s] == oldest) if begun[stage] > oldest else 0.0
        return self.used[rank] + size[stage] + others <= self.problem.cap[rank]

    def begin(self, rank: int, start: float, kind: int, stage: int) -> None:
        problem, j = self.problem, self.begun[kind][stage]
        end = start + problem.seconds[kind][stage]
        action = problem.at(kind, stage, j)
        self.begun[kind][stage] += 1
        self.free[rank] = end
        self.used[rank] += problem.grows[action]
        self.orders[rank].append(action)
        if kind == 0 and stage + 1 < problem.stages:
            self.arrived[0][stage + 1].append(end + problem.lag[stage])
        elif kind == 0:
            self.arrived[1][stage].append(end)
        elif kind == 1:
            if stage:
                self.arrived[1][stage - 1].append(end + problem.lag[stage - 1])
            if problem.split:
                self.arrived[2][stage].append(end)
