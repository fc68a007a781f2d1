"""Partition: a chain of atoms into consecutive stages whose slowest is as fast as can be. Pure
arithmetic; no torch.

costs 1 1 1 1 4, 3 stages        1 1 | 1 1 | 4        slowest 4

Optimal over the chain, by bisecting on the slowest stage's time (Pınar and Aykanat, "Fast optimal
load balancing algorithms for 1D partitioning", 2004). Their greedy probe counts the stages that a
time needs at least, which says nothing once a cut itself costs time; here a probe asks for exactly
`parts` stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from weft.core import ConfigError

Ints = NDArray[np.int64]
FIELD = "pipeline"
# times are whole multiples of a power of two, at most 2**-GRAIN of their total: sums and ties are
# exact
GRAIN = 48
NEVER = np.iinfo(np.int64).max // 4


def partition(
    costs: Sequence[float],
    parts: int,
    *,
    crossing: Sequence[float] | None = None,
    fixed: Sequence[int] = (),
    sizes: Sequence[float] | None = None,
    limit: float = math.inf,
    placement: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """The first atom of each of `parts` nonempty stages, chosen so that the largest stage time is
    least.

    `costs[i]` is the time of atom i, and a stage's time the sum over its atoms. `crossing[i]` is
    the time of a cut before atom i, which both neighbouring stages pay; infinity forbids that cut
    (`crossing[0]` is not read). Before every atom of `fixed` there is a cut. The `sizes` of a
    stage's atoms (its memory) sum to at most `limit`. Among equally good partitions each cut, from
    the front, leaves its stage nearest to an even share of what remains, so equal atoms give even
    stages.

    With `placement` (stage -> rank; several stages on one rank) the largest time of a *rank* is
    made small: the chain's optimum, then cuts moved while that helps. This is a local optimum, not
    always the best. Neighbouring stages on the same rank pay no crossing.

    Raises ConfigError (field `pipeline`) for fewer atoms than stages, and where the limit or the
    cuts that are fixed or forbidden leave no partition. Cost: O(parts n) per bisection; 10,000
    atoms in 512 stages take about a second.
    """
    chain = _Chain(costs, parts, crossing, fixed, sizes, limit)
    if placement is not None and len(placement) != parts:
        raise ConfigError(
            FIELD, parts, f"the placement has {len(placement)} stages", "give each stage a rank"
        )
    cuts = chain.best()
    return tuple(cuts if placement is None else _spread(chain, cuts, tuple(placement)))


class _Chain:
    """The costs of the chain as prefix sums in whole units. Position i is the cut before atom i;
    position n is the end."""

    def __init__(
        self,
        costs: Sequence[float],
        parts: int,
        crossing: Sequence[float] | None,
        fixed: Sequence[int],
        sizes: Sequence[float] | None,
        limit: float,
    ):
        n = self.atoms = len(costs)
        self.parts, self.limit = parts, limit
        if parts < 1:
            raise ConfigError(FIELD, parts, "a pipeline needs at least one stage", "use 1 or more")
        if n < parts:
            raise ConfigError(
                FIELD,
                parts,
                f"the model has only {n} parts to divide among stages",
                f"use at most {n} stages",
            )
        time = np.asarray(costs, dtype=float)
        cross = np.zeros(n + 1)
        if crossing is not None:
            cross[1:n] = np.asarray(crossing, dtype=float)[1:n]
        if (
            not np.isfinite(time).all()
            or (time < 0).any()
            or np.isnan(cross).any()
            or (cross < 0).any()
        ):
            raise ConfigError(
                FIELD, parts, "a time is negative or not a number", "use times of 0 or more"
            )
        self.fixed = frozenset(i for i in fixed if i)
        if not all(0 < i < n for i in self.fixed):
            raise ConfigError(
                FIELD, parts, f"a fixed cut lies outside atoms 1 to {n - 1}", "name an atom inside"
            )

        self.allowed = np.isfinite(cross)
        cross = np.where(self.allowed, cross, 0.0)
        total = float(time.sum() + 2 * cross.sum())
        unit = math.ldexp(1.0, math.frexp(total)[1] - GRAIN) if total else 1.0
        whole = np.concatenate(([0], np.cumsum(np.rint(time / unit).astype(np.int64))))
        self.done, self.cross = whole, np.rint(cross / unit).astype(np.int64)
        # A stage from a to i lasts ends[i] - starts[a].
        self.ends: Ints = whole + self.cross
        self.starts: Ints = whole - self.cross
        self.least = max(int(np.diff(whole).max()), -(-int(whole[-1]) // parts))
        self.reach = self._reach(sizes)

    def _reach(self, sizes: Sequence[float] | None) -> Ints | None:
        """Position a -> the last position at which a stage that starts at a may end; None if that
        is always n."""
        n = self.atoms
        reach = np.full(n + 1, n)
        if sizes is not None and math.isfinite(self.limit):
            weight = np.concatenate(([0.0], np.cumsum(np.asarray(sizes, dtype=float))))
            slack = 1e-12 * weight[-1]  # the rounding of the prefix sums
            reach = np.searchsorted(weight, weight + self.limit + slack, side="right") - 1
        for i in sorted(self.fixed):
            reach[:i] = np.minimum(reach[:i], i)
        return reach if (reach < n).any() else None

    def best(self) -> list[int]:
        """The first atoms of the stages of the best partition. Raises ConfigError if there is
        none."""
        if (cuts := self.cut(NEVER)) is None:
            raise _no_partition(self)
        low, high = self.least, self.slowest(cuts)
        while low < high:
            middle = (low + high) // 2
            if (found := self.cut(middle)) is None:
                low = middle + 1
            else:
                high = self.slowest(found)
        # Asked at the optimum itself, so that ties do not depend on the way there.
        return self.cut(high) or cuts

    def cut(self, slowest: int) -> list[int] | None:
        """The first atoms of exactly `parts` stages that last at most `slowest` each, or None."""
        possible = self._possible(slowest)
        if not possible[self.parts][0]:
            return None
        cuts, n = [0], self.atoms
        for left in range(self.parts - 1, 0, -1):
            a = cuts[-1]
            last = n if self.reach is None else int(self.reach[a])
            ends = self.ends[a + 1 : last + 1] - self.starts[a]
            choices = a + 1 + np.flatnonzero((ends <= slowest) & possible[left][a + 1 : last + 1])
            # Distance to the even share, times the stages left: whole numbers compare exactly.
            share = (self.done[choices] - self.done[a]) * (left + 1)
            cuts.append(int(choices[np.argmin(np.abs(share - (self.done[n] - self.done[a])))]))
        return cuts

    def _possible(self, slowest: int) -> list[NDArray[np.bool_]]:
        """[k][a]: whether atoms a, a+1, ... can be k stages, none slower than `slowest`."""
        possible = [np.zeros(self.atoms + 1, dtype=bool)]
        possible[0][-1] = True
        for _ in range(self.parts):
            ends = np.where(possible[-1], self.ends, NEVER)
            soonest = self._soonest(ends)
            possible.append(self.allowed & (soonest < NEVER) & (soonest - self.starts <= slowest))
        return possible

    def _soonest(self, ends: Ints) -> Ints:
        """For each position a, the least of `ends` over the positions where a stage from a may
        end."""
        soonest = np.full(self.atoms + 1, NEVER)
        if self.reach is None:
            soonest[:-1] = np.minimum.accumulate(ends[:0:-1])[::-1]
            return soonest
        # A window is the union of two runs of 2**k positions: a table of the least over runs
        # answers all windows.
        width = self.reach - np.arange(self.atoms + 1)
        run, size, table = ends, 1, []
        while size <= width.max():
            table.append((size, run))
            run = np.minimum(run, np.concatenate((run[size:], np.full(size, NEVER))))
            size *= 2
        for size, run in table:
            at = np.flatnonzero((width >= size) & (width < 2 * size))
            soonest[at] = np.minimum(run[at + 1], run[self.reach[at] - size + 1])
        return soonest

    def slowest(self, cuts: Sequence[int]) -> int:
        bounds = np.array([*cuts, self.atoms])
        return int((self.ends[bounds[1:]] - self.starts[bounds[:-1]]).max())


def _no_partition(chain: _Chain) -> ConfigError:
    """Why no partition exists, even for stages of any length."""
    free = int(chain.allowed[1:-1].sum()) + 1
    reach = chain.reach
    problem = f"no partition keeps every stage within the limit of {chain.limit:g}"
    fix = "raise the limit, or use more stages"
    if len(chain.fixed) >= chain.parts:
        problem, fix = (
            f"{len(chain.fixed)} cuts are fixed",
            f"use at least {len(chain.fixed) + 1} stages",
        )
    elif any(not chain.allowed[i] for i in chain.fixed):
        problem, fix = "a fixed cut is also forbidden", "allow that cut, or do not fix it"
    elif free < chain.parts:
        problem, fix = (
            f"{chain.parts - 1} cuts are needed and {free - 1} allowed",
            f"use at most {free} stages",
        )
    elif reach is not None and (alone := np.flatnonzero(reach[:-1] == np.arange(chain.atoms))).size:
        problem = f"atom {alone[0]} alone is above the limit of {chain.limit:g}"
        fix = "raise the limit"
    return ConfigError(FIELD, chain.parts, problem, fix)


def _spread(chain: _Chain, cuts: list[int], placement: tuple[int, ...]) -> list[int]:
    """Move one cut, or two at once, by one atom, as long as (largest rank, sum of squares over
    ranks) falls."""
    n, parts = chain.atoms, chain.parts
    pays = [a != b for a, b in pairwise(placement)]

    def judge(cuts: Sequence[int]) -> tuple[int, int]:
        times = dict.fromkeys(placement, 0)
        for stage, (a, i) in enumerate(zip(cuts, [*cuts[1:], n])):
            into, out = stage and pays[stage - 1], stage + 1 < parts and pays[stage]
            crossing = int(chain.cross[a]) * bool(into) + int(chain.cross[i]) * bool(out)
            times[placement[stage]] += int(chain.done[i] - chain.done[a]) + crossing
        return max(times.values()), sum(time * time for time in times.values())

    def sound(cuts: Sequence[int]) -> bool:
        bounds = [*cuts, n]
        return all(
            a < i and chain.allowed[a] and (chain.reach is None or i <= chain.reach[a])
            for a, i in pairwise(bounds)
        ) and chain.fixed <= set(cuts)

    single = [{k: step} for k in range(1, parts) for step in (-1, 1)]
    # Two cuts at once only where they bound stages of one rank: what one adds to it, the other may
    # take away.
    ranks = [{*placement[k - 1 : k + 1]} for k in range(parts)]
    pairs = [(k, i) for k in range(1, parts) for i in range(k + 1, parts) if ranks[k] & ranks[i]]
    double = [{k: one, i: two} for k, i in pairs for one in (-1, 1) for two in (-1, 1)]
    best, score = list(cuts), judge(cuts)
    improved = True
    while improved:
        improved = False
        for move in [*single, *double]:
            moved = [a + move.get(k, 0) for k, a in enumerate(best)]
            if sound(moved) and (better := judge(moved)) < score:
                best, score, improved = moved, better, True
    return best
