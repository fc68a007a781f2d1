"""solved: a synchronous schedule searched for measured costs and a memory cap, after Qi et al.,
"Zero Bubble Pipeline Parallelism" (ICLR 2024), section 3.1, whose heuristic this generalises to
uneven stages and any placement.

    3 ranks, 3 microbatches,      rank 0   0F0 0F1  .   .   .  0B0 0W0 0F2 0B1 0W1  .   .  0B2 0W2
    F = B = W, memory 2           rank 1    .  1F0 1F1  .  1B0 1W0  .  1B1 1F2 1W1  .  1B2 1W2  .
                                  rank 2    .   .  2F0 2B0 2W0 2F1 2B1 2W1  .  2F2 2B2 2W2  .   .

Until the best schedule reaches a lower bound, the search tries in turn:

1. every fixed schedule of the same placement that fits the memory cap, then 3;
2. list schedules: each rank starts the action that is due first. A rule says when actions are due,
   how many microbatches a stage keeps live, and how long a rank waits for an action that is due
   before those that it could start. First the rules of a small grid, then random changes of the
   best rule;
3. moves of one action along its rank, starting from the best schedule, within or out of a busy
   stretch of the critical path (the block moves of job-shop search), accepted late (Burke and
   Bykov, 2017).

The budget counts schedules, not seconds, and the random numbers have a seed: every rank and every
run with the same input finds the same schedule.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product, takewhile

from weft.core import ActionCosts, Number, Refusal, Schedule

from ._list_schedule import DispatchRule, ListSchedule
from ._scheduling_problem import EXACT, Orders, SchedulingProblem

NAME = "solved"
NEEDS_COSTS = True  # a planner that knows ranks and microbatches alone cannot price it
BACK = 200  # a move is compared with what was the makespan so many moves ago
# moves for each evaluation of the budget: most are not possible, and the rest only time an order
MOVES = 30


def build(
    ranks: int,
    microbatches: int,
    *,
    costs: ActionCosts | None = None,
    memory: Number | None = None,
    placement: str | Sequence[int] = "loop",
    chunks: int = 1,
    split: bool = True,
    evaluations: int = 300,
    seed: int = 0,
) -> Schedule:
    """The fastest schedule found for these costs.

    It is never slower than a fixed schedule of this folder with the same placement and within the
    same memory. Of equally fast schedules it is the one with the lowest peak memory.

    Args:
        ranks: Pipeline ranks.
        microbatches: Microbatches of one step.
        costs: Seconds and bytes of the actions (default: all stages equal, F = B = W).
        memory: The most that may be live on a rank: one number, or one for each rank, in the unit
            of `costs.activation_bytes`. An activation is live from the start of its F to the end of
            its last backward (W if `split`, else B).
        placement: Stage -> rank, or "loop" (stage s on rank s mod ranks), or "v" (every second of
            the `chunks` rounds runs backwards).
        chunks: Stages of a rank.
        split: Whether backwards are split into B and W.
        evaluations: The budget, in list schedules. Half of it goes to moves, which are cheaper and
            more. On 8 ranks and 32 microbatches the default takes a second or two, and much less
            if the lower bound is reached.
        seed: Of the random numbers.

    Raises:
        ConfigError: No order keeps the memory cap (names the least that works), or the placement is
            not one.
    """
    problem = SchedulingProblem(
        ranks, microbatches, costs or ActionCosts(), memory, placement, chunks, split
    )
    search = _ScheduleSearch(problem, random.Random(seed))
    search.fixed()
    search.moves(evaluations // 4 * MOVES)
    search.rules(evaluations // 2)
    search.moves(evaluations // 4 * MOVES)
    return problem.schedule(NAME, search.best)


def bound(
    ranks: int,
    microbatches: int,
    *,
    costs: ActionCosts | None = None,
    memory: Number | None = None,
    placement: str | Sequence[int] = "loop",
    chunks: int = 1,
    split: bool = True,
) -> float:
    """Seconds below which no schedule of these costs finishes. Arguments and errors are those of
    `build`."""
    return SchedulingProblem(
        ranks, microbatches, costs or ActionCosts(), memory, placement, chunks, split
    ).bound()


class _ScheduleSearch:
    """The best orders so far, and the ways to better ones."""

    def __init__(self, problem: SchedulingProblem, rng: random.Random):
        self.problem, self.rng = problem, rng
        self.enough = problem.bound() * (1 + EXACT)
        self.makespan = self.peak = math.inf
        self.best: Orders = []
        self.offer(*ListSchedule(problem, next(self._grid())).run())

    def offer(self, makespan: float, orders: Orders) -> None:
        """Keeps these orders if they are faster than the best, or as fast with a lower peak of
        memory."""
        if makespan < self.makespan * (1 + EXACT):
            peak = max(self.problem.peaks(orders))
            if makespan < self.makespan * (1 - EXACT) or peak < self.peak * (1 - EXACT):
                self.makespan, self.peak, self.best = (
                    makespan,
                    peak,
                    [list(order) for order in orders],
                )

    def tries(self, count: int) -> Iterator[int]:
        """0, 1, ..., up to `count` of them, while the best is above the lower bound."""
        return takewhile(lambda _: self.makespan > self.enough, range(count))

    def fixed(self) -> None:
        """The schedules of this folder, as far as they are of this placement and within the cap.
        Not the registered ones: such a one may be made by this very search."""
        from ..schedules import builtin_schedules

        problem = self.problem
        for name, make in builtin_schedules().items():
            if name == NAME:
                continue
            chunked = "chunks" in inspect.signature(make).parameters
            options = {"chunks": problem.stages // problem.ranks} if chunked else {}
            try:
                orders = problem.orders(make(problem.ranks, problem.microbatches, **options))
            except Refusal:
                continue
            if orders is not None and problem.fits(orders) and (times := problem.times(orders)):
                self.offer(max(times[1]), orders)

    def rules(self, count: int) -> None:
        """List schedules by the rules of the grid, then by random changes of the best rule."""
        grid = self._grid()
        current, rule = math.inf, next(self._grid())
        for _ in self.tries(count):
            tried = next(grid, None) or self._changed(rule)
            makespan, orders = ListSchedule(self.problem, tried).run()
            self.offer(makespan, orders)
            if makespan <= current * (1 + EXACT):
                current, rule = makespan, tried

    def _grid(self) -> Iterator[DispatchRule]:
        problem = self.problem
        first, count = problem.first, problem.microbatches
        cycle = max(problem.work(r) for r in range(problem.ranks))
        soon = -count * cycle - first[2][0]
        # Microbatches that pass while one goes from a stage to the end and back, and what then
        # still is to do.
        trip = [
            math.ceil((w - f) / cycle + EXACT) if cycle else 1 for f, w in zip(first[0], first[2])
        ]
        depth = [problem.stages - s for s in range(problem.stages)]
        lives = [
            depth,
            [2 * d - 1 for d in depth],
            trip,
            [t + 1 for t in trip],
            [count] * problem.stages,
        ]
        # A backward comes in turn or at once; a weight's in turn or when nothing else is there.
        for backward, weight, wait, live in product(
            (0.0, soon), (0.0, -soon), (0.0, 0.5, 1.0), lives
        ):
            due = (first[0], [t + backward for t in first[1]], [t + weight for t in first[2]])
            yield DispatchRule(
                tuple(tuple(kind) for kind in due), cycle, tuple(max(1, n) for n in live), wait
            )

    def _changed(self, rule: DispatchRule) -> DispatchRule:
        rng, stages = self.rng, self.problem.stages
        at = rng.randrange(stages) if rng.random() < 0.6 else None  # one stage, or all
        what = rng.randrange(5)
        if what == 0:
            return replace(rule, wait=rng.choice((0.0, 0.25, 0.5, 0.75, 1.0)))
        if what == 1:
            step = rng.choice((-1, 1))
            return replace(
                rule,
                live=tuple(max(1, n + step * (at in (None, s))) for s, n in enumerate(rule.live)),
            )
        kind, by = what - 2, rng.gauss(0.0, rule.cycle)
        due = list(rule.due)
        due[kind] = tuple(t + by * (at in (None, s)) for s, t in enumerate(due[kind]))
        return replace(rule, due=tuple(due))

    def moves(self, count: int) -> None:
        """Moves of one action from the best, accepted if no slower than now or than a while ago."""
        problem, orders = self.problem, [list(order) for order in self.best]
        times = problem.times(orders)
        assert times is not None  # list schedules and fixed ones were timed
        current = max(times[1])
        recent: list[float] = [current] * BACK
        for n in self.tries(count):
            if moved := self._move(orders, times):
                rank, order = moved
                before, orders[rank] = orders[rank], order
                after = problem.times(orders)
                if after is None or (makespan := max(after[1])) > max(current, recent[n % BACK]) * (
                    1 + EXACT
                ):
                    orders[rank] = before
                else:
                    current, times = makespan, after
                    self.offer(makespan, orders)
            recent[n % BACK] = current

    def _move(
        self, orders: Orders, times: tuple[list[float], list[float]]
    ) -> tuple[int, list[int]] | None:
        """A rank and its new order, or None if the move drawn is not possible."""
        blocks = [b for b in self._critical(orders, *times) if b[1] < b[2]]
        if not blocks:
            return None
        rng = self.rng
        rank, first, last = rng.choice(blocks)
        order = orders[rank]
        way = rng.randrange(3)
        if way == 0:  # out of the block, to after it
            source, target = rng.randrange(first, last), last
        elif way == 1:  # out of the block, to before it
            source, target = rng.randrange(first + 1, last + 1), first
        else:
            source, target = rng.sample(range(first, last + 1), 2)
        order = list(order)
        order.insert(target, order.pop(source))
        return (
            (rank, order)
            if self._sound(rank, order, min(source, target), max(source, target))
            else None
        )

    def _sound(self, rank: int, order: list[int], low: int, high: int) -> bool:
        """Whether F, B and W of each activation are in turn, and memory is kept, where the order
        changed."""
        problem = self.problem
        apart = problem.stages * problem.microbatches  # between F, B and W of one activation
        seen = set()
        for a in order[low : high + 1]:
            if a + apart in seen or a + 2 * apart in seen:
                return False
            seen.add(a)
        return problem.peaks([order[: high + 1]])[0] <= problem.cap[rank]

    def _critical(
        self, orders: Orders, start: list[float], end: list[float]
    ) -> Iterator[tuple[int, int, int]]:
        """A longest path, from its end: (rank, first, last) of each stretch without idle time in a
        rank's order."""
        problem, rng = self.problem, self.rng
        rank = max((r for r in range(problem.ranks) if orders[r]), key=lambda r: end[orders[r][-1]])
        first = last = len(orders[rank]) - 1
        while True:
            a = orders[rank][first]
            busy = first > 0 and end[orders[rank][first - 1]] == start[a]
            source = problem.need[a]
            fed = source >= 0 and end[source] + problem.lags[a] == start[a]
            if busy and not (fed and rng.random() < 0.5):
                first -= 1
                continue
            yield rank, first, last
            if not fed:
                return
            rank = problem.rank[source]
            first = last = orders[rank].index(source)
