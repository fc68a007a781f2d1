"""The problem that `solved` searches: the actions of a pipeline, what each takes and needs, and how
orders of them are timed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, product

from weft.core import Action, ActionCosts, ConfigError, Kind, Number, Schedule

KINDS: tuple[Kind, ...] = ("F", "B", "W")
EXACT = 1e-9  # times and sizes nearer than this, as a share, are equal
Orders = list[list[int]]  # rank -> its actions by index


class SchedulingProblem:
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

    def schedule(self, name: str, orders: Orders) -> Schedule:
        return Schedule(
            name, self.placement, tuple(tuple(self.actions[a] for a in order) for order in orders)
        )


def _caps(memory: Number | None, ranks: int) -> list[float]:
    if memory is None:
        return [math.inf] * ranks
    caps = [memory] * ranks if isinstance(memory, int | float) else list(memory)
    if len(caps) != ranks:
        raise ConfigError(
            "pipeline.memory",
            memory,
            f"{len(caps)} numbers for {ranks} ranks",
            f"give one number, or {ranks}",
        )
    return [float(cap) for cap in caps]


def _rate(seconds: float, size: float) -> float:
    """Seconds of work that come with each byte."""
    return seconds / size if size else math.inf


def _placement(placement: str | Sequence[int], ranks: int, chunks: int) -> tuple[int, ...]:
    if chunks < 1:
        raise ConfigError(
            "pipeline.chunks", chunks, "a rank needs at least one stage", "use 1 or more"
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
            "pipeline.placement", placement, "is not a placement of stages on ranks", fix
        )
    return found
