"""solved: a synchronous schedule searched for measured costs and a memory cap, after Qi et al.,
"Zero Bubble Pipeline Parallelism" (ICLR 2024), section 3.1, whose heuristic this generalises to
uneven stages and any placement.

    3 ranks, 3 microbatches,      rank 0   0F0 0F1  .   .   .  0B0 0W0 0F2 0B1 0W1  .   .  0B2 0W2
    F = B = W, memory 2           rank 1    .  1F0 1F1  .  1B0 1W0  .  1B1 1F2 1W1  .  1B2 1W2  .
                                  rank 2    .   .  2F0 2B0 2W0 2F1 2B1 2W1  .  2F2 2B2 2W2  .   .

In turn, while the best is above a lower bound:

1. every fixed schedule of the same placement that fits the memory cap, then 3;
2. list schedules: each rank starts the action that is due first, where a rule says when actions are due, how many
   microbatches a stage keeps live, and how long a rank waits for an action that is due before those
   it could start; first the rules of a small grid, then random changes of the best rule;
3. from the best so far, moves of one action along its rank, within or out of a busy stretch of the critical path
   (the block moves of job-shop search), accepted late (Burke and Bykov, 2017).

The budget counts schedules, not seconds, and random numbers start from the seed given: every rank
and run of the same input finds the same schedule.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product, takewhile

from weft.core import Action, ActionCosts, ConfigError, Kind, Number, Refusal, Schedule

NAME = "solved"
NEEDS_COSTS = True  # a planner that knows ranks and microbatches alone cannot price it
KINDS: tuple[Kind, ...] = ("F", "B", "W")
EXACT = 1e-9  # times and sizes nearer than this, as a share, are equal
BACK = 200  # a move is compared with what was the makespan so many moves ago
MOVES = (
    30  # moves per unit of the budget, for most are not possible and the rest only time an order
)
Orders = list[list[int]]  # rank -> its actions by index


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
    """The fastest schedule found for these costs (default: all stages equal, F = B = W).

    `memory` caps what is live on a rank, one number or one per rank, in the unit of
    `costs.activation_bytes`: an activation is live from the start of its F to the end of its last
    backward (W where `split`, else B). `placement` is stage -> rank, or "loop" (stage s on rank s
    mod ranks) or "v" (every second of the `chunks` rounds backwards). `evaluations` is the budget
    in list schedules; half of it goes to moves, which are cheaper and more. On 8 ranks and 32
    microbatches the default takes a second or two, and much less where the lower bound is met.

    Never slower than a fixed schedule of the folder of the same placement within the same memory;
    of equally fast ones, that of the lowest peak. Raises ConfigError for a memory cap that no order
    keeps, with the least that works, and for a placement that is none.
    """
    problem = _Problem(
        ranks, microbatches, costs or ActionCosts(), memory, placement, chunks, split
    )
    search = _Search(problem, random.Random(seed))
    search.fixed()
    search.moves(evaluations // 4 * MOVES)
    search.rules(evaluations // 2)
    search.moves(evaluations // 4 * MOVES)
    return problem.schedule(search.best)


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
    return _Problem(
        ranks, microbatches, costs or ActionCosts(), memory, placement, chunks, split
    ).bound()


class _Problem:
    """Actions as indices `(kind * stages + stage) * microbatches + microbatch`, and what each takes
    and needs.

    An action needs at most one other of another stage (F: the stage before; B: the stage after);
    that it comes after those of its own stage is a law of the order within its rank.
    """

    def __init__(
        self,
        ranks: int,
        microbatches: int,
        costs: ActionCosts,
        memory: Number | None,
        placement: str | Sequence[int],
        chunks: int,
        split: bool,
    ):
        self.placement = _placement(placement, ranks, chunks)
        stages, self.ranks, self.microbatches, self.split = (
            len(self.placement),
            ranks,
            microbatches,
            split,
        )
        self.stages = stages
        self.stages_of = [
            [s for s in range(stages) if self.placement[s] == r] for r in range(ranks)
        ]
        forward, backward, weight, self.size = (
            costs.each(name, stages)
            for name in ("forward_s", "backward_s", "weight_s", "activation_bytes")
        )
        self.freed_by_b = costs.freed_by_b if split else 1.0
        if not split:
            backward, weight = tuple(b + w for b, w in zip(backward, weight)), (0.0,) * stages
        comm = costs.each("comm_s", stages - 1)
        self.lag = [
            0.0 if a == b else c for a, b, c in zip(self.placement, self.placement[1:], comm)
        ]
        self.seconds = (forward, backward, weight)
        needed = [sum(self.size[s] for s in own) for own in self.stages_of]
        self.cap = _caps(memory, ranks)
        if not all(need <= cap * (1 + EXACT) for need, cap in zip(needed, self.cap)):
            least = max(needed) if isinstance(memory, int | float) else needed
            problem = "one microbatch alone keeps more than that live on a rank"
            raise ConfigError("pipeline.memory", memory, problem, f"use at least {least}")
        self.cap = [cap * (1 + EXACT) for cap in self.cap]
        self._index()
        self._paths()

    def _index(self) -> None:
        stages, count, kinds = self.stages, self.microbatches, KINDS if self.split else KINDS[:2]
        self.actions = [Action(k, s, j) for k in kinds for s in range(stages) for j in range(count)]
        self.rank = [self.placement[a.stage] for a in self.actions]
        self.length = [self.seconds[KINDS.index(a.kind)][a.stage] for a in self.actions]
        share = {"F": 1.0, "B": -self.freed_by_b, "W": self.freed_by_b - 1.0}
        self.grows = [self.size[a.stage] * share[a.kind] for a in self.actions]
        total = len(self.actions)
        self.need, self.lags, self.feeds = [-1] * total, [0.0] * total, [-1] * total
        for s, j in product(range(stages - 1), range(count)):
            for kind, source, target in ((0, s, s + 1), (1, s + 1, s)):
                a, b = self.at(kind, source, j), self.at(kind, target, j)
                self.need[b], self.lags[b], self.feeds[a] = a, self.lag[s], b

    def _paths(self) -> None:
        """When a lone microbatch would start each (kind, stage)."""
        forward, backward, _ = self.seconds
        self.first = ([0.0], [0.0], [0.0])
        for s in range(self.stages - 1):
            self.first[0].append(self.first[0][-1] + forward[s] + self.lag[s])
        turn = [self.first[0][-1] + forward[-1]]
        for s in reversed(range(self.stages - 1)):
            turn.append(turn[-1] + backward[s + 1] + self.lag[s])
        self.first = (self.first[0], turn[::-1], [t + b for t, b in zip(turn[::-1], backward)])

    def at(self, kind: int, stage: int, microbatch: int) -> int:
        return (kind * self.stages + stage) * self.microbatches + microbatch

    def work(self, rank: int) -> float:
        """Seconds of a rank's actions of one microbatch."""
        return sum(kind[s] for kind in self.seconds for s in self.stages_of[rank])

    def bound(self) -> float:
        forward, _, weight = self.seconds
        first_forward, first_backward, first_weight = self.first
        count, rest = self.microbatches, 1 - self.freed_by_b
        best = alone = first_weight[0] + weight[0]
        for rank, own in enumerate(self.stages_of):
            cap = self.cap[rank]
            if (
                len(sizes := {self.size[s] for s in own}) == 1
                and (size := max(sizes)) > 0
                and cap < math.inf
            ):
                cap = size * int(cap / size)
            # Until the first backward arrives there are only forwards to do, and after the last has
            # left only weights': no more than all, and no more than the memory holds.
            fill = min(
                count * sum(forward[s] for s in own),
                cap * max(_rate(forward[s], self.size[s]) for s in own),
            )
            drain = min(
                count * sum(weight[s] for s in own),
                cap * max(_rate(weight[s], self.size[s] * rest) for s in own),
            )
            before = max(
                min(first_forward[s] for s in own), min(first_backward[s] for s in own) - fill
            )
            leave = min(alone - first_weight[s] if s else 0.0 for s in own)
            best = max(best, count * self.work(rank) + before + max(0.0, leave - drain))
            # Memory times the time for which the activations hold it, at the least.
            held = sum(
                self.size[s] * (first_weight[s] - first_forward[s] + rest * weight[s]) for s in own
            )
            if held:
                best = max(best, min(first_forward[s] for s in own) + count * held / cap)
        return best

    def times(self, orders: Orders) -> tuple[list[float], list[float]] | None:
        """Start and end of every action, each as early as its rank's order allows; None if the
        orders deadlock."""
        rank, length, need, lags, feeds = self.rank, self.length, self.need, self.lags, self.feeds
        start, end = [0.0] * len(length), [-1.0] * len(length)
        place, free, awaited = [0] * self.ranks, [0.0] * self.ranks, [-1] * self.ranks
        ready, done = list(range(self.ranks)), 0
        while ready:
            r = ready.pop()
            order, i, now = orders[r], place[r], free[r]
            first, stop = i, len(order)
            while i < stop:
                a = order[i]
                source = need[a]
                if source >= 0:
                    arrival = end[source]
                    if arrival < 0.0:
                        awaited[r] = a
                        break
                    arrival += lags[a]
                    if arrival > now:
                        now = arrival
                start[a] = now
                now += length[a]
                end[a] = now
                i += 1
                target = feeds[a]
                if target >= 0 and awaited[rank[target]] == target:
                    awaited[rank[target]] = -1
                    ready.append(rank[target])
            place[r], free[r] = i, now
            done += i - first
        return (start, end) if done == len(length) else None

    def peaks(self, orders: Orders) -> list[float]:
        """Rank -> the most that is live at once."""
        return [max(accumulate((self.grows[a] for a in order), initial=0.0)) for order in orders]

    def fits(self, orders: Orders) -> bool:
        return all(peak <= cap for peak, cap in zip(self.peaks(orders), self.cap))

    def orders(self, schedule: Schedule) -> Orders | None:
        """The same order in indices; whole backwards are followed by their W where this problem
        splits. None if the schedule is not one of this problem."""
        kinds = {a.kind for order in schedule.order for a in order}
        if (
            schedule.placement != self.placement
            or "U" in kinds
            or ("W" in kinds and not self.split)
        ):
            return None
        orders: Orders = []
        for order in schedule.order:
            orders.append([])
            for a in order:
                orders[-1].append(self.at(KINDS.index(a.kind), a.stage, a.microbatch))
                if self.split and a.kind == "B" and "W" not in kinds:
                    orders[-1].append(self.at(2, a.stage, a.microbatch))
        return orders

    def schedule(self, orders: Orders) -> Schedule:
        return Schedule(
            NAME, self.placement, tuple(tuple(self.actions[a] for a in order) for order in orders)
        )


@dataclass(frozen=True)
class _Rule:
    """How a list schedule chooses. `due[kind][stage]`: seconds at which microbatch 0's action is
    due, each later microbatch one `cycle` later. `live[stage]`: most microbatches in flight.
    `wait`: share of the soonest possible completion for which an action that is due earlier is
    waited for (0: a rank never idles by choice)."""

    due: tuple[tuple[float, ...], ...]
    cycle: float
    live: tuple[int, ...]
    wait: float


class _List:
    """A list schedule in the making: what has arrived where, and what each rank would start
    next."""

    def __init__(self, problem: _Problem, rule: _Rule):
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


class _Search:
    """The best orders so far, and the ways to better ones."""

    def __init__(self, problem: _Problem, rng: random.Random):
        self.problem, self.rng = problem, rng
        self.enough = problem.bound() * (1 + EXACT)
        self.makespan = self.peak = math.inf
        self.best: Orders = []
        self.offer(*_List(problem, next(self._grid())).run())

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
            makespan, orders = _List(self.problem, tried).run()
            self.offer(makespan, orders)
            if makespan <= current * (1 + EXACT):
                current, rule = makespan, tried

    def _grid(self) -> Iterator[_Rule]:
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
            yield _Rule(
                tuple(tuple(kind) for kind in due), cycle, tuple(max(1, n) for n in live), wait
            )

    def _changed(self, rule: _Rule) -> _Rule:
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


def _caps(memory: Number | None, ranks: int) -> list[float]:
    if memory is None:
        return [math.inf] * ranks
    caps = [memory] * ranks if isinstance(memory, int | float) else list(memory)
    if len(caps) != ranks:
        raise ConfigError(
            "pipeline.memory",
            memory,
            f"{len(caps)} numbers for {ranks} ranks",
            f"give one, or {ranks}",
        )
    return [float(cap) for cap in caps]


def _rate(seconds: float, size: float) -> float:
    """Seconds of work that come with each byte."""
    return seconds / size if size else math.inf


def _placement(placement: str | Sequence[int], ranks: int, chunks: int) -> tuple[int, ...]:
    if chunks < 1:
        raise ConfigError(
            "pipeline.chunks", chunks, "a rank has at least one stage", "use 1 or more"
        )
    if placement == "loop":
        return tuple(range(ranks)) * chunks
    if placement == "v":
        return tuple(
            rank
            for chunk in range(chunks)
            for rank in (range(ranks) if chunk % 2 == 0 else range(ranks)[::-1])
        )
    found = () if isinstance(placement, str) else tuple(placement)
    if set(found) != set(range(ranks)):
        fix = (
            f'use "loop", "v", or the rank (0 to {ranks - 1}) of each stage, every rank at least'
            " once"
        )
        raise ConfigError(
            "pipeline.placement", placement, "is no placement of stages on ranks", fix
        )
    return found
