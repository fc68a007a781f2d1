"""ZB-V (Qi et al. 2024): two stages per rank in V, so that the first rank also has the loss; B and
W apart.

2 ranks, 3 microbatches

rank 0   0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 3F2 3B2 3W2 0B1 0W1     0B2 0W2
rank 1       1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1B1 1W1 2B2 1B2 2W2 1W2
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.core import Schedule

from ._parts import Array, ScheduleSummary, split_backward_idle, v_schedule

NAME = "zb-v"


def build(ranks: int, microbatches: int) -> Schedule:
    """Bubble (p-1)F/2 where F = B = W and m >= 2p - 1; at most p microbatches live on every rank,
    each until its W."""

    def program(rank: int, total: int) -> Iterator[str]:
        below = ranks - 1 - rank
        yield from ("F0",) * (2 * below)
        yield from ("F0", "F1") * (rank + 1)
        yield from ("b1", "W", "F1") * below
        yield from ("b1", "W", "F0", "b0", "W", "F1") * (total - ranks - below)
        yield from ("b1", "W", "b0", "W", "F1") * below
        yield from ("b1", "b0") * (rank + 1)
        yield from ("b0", "W") * below
        yield from ("W",) * (2 * (rank + 1))

    return v_schedule(NAME, ranks, microbatches, program)


def min_microbatches(ranks: Array) -> Array:
    """With fewer microbatches the bubble is larger than the one that `build` states."""
    return 2 * ranks - 1


def summarize(
    p: Array, m: Array, v: Array, forward: Array, backward: Array, weight: Array
) -> ScheduleSummary:
    live = np.minimum(p, m)
    return ScheduleSummary(
        split_backward_idle((p - 1) / 2 * forward, p, m, v, forward, backward, weight), live, live
    )
