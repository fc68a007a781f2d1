"""DualPipeV (DeepSeek 2025): two stages per rank in V; in the middle a forward of one chunk and a
backward of the other stand next to each other, for their computing and messages to overlap. A B
without W is a whole backward.

2 ranks, 3 microbatches

rank 0   0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3F2 0B0 3B2 0B1     0B2 0W2
rank 1       1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 2B1 1B1 2B2 1B2
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.core import Schedule

from ._parts import Array, ScheduleSummary, split_backward_idle, v_schedule

NAME = "dualpipev"


def build(ranks: int, microbatches: int) -> Schedule:
    """Bubble (p-1)(F+B-W)/2 where W <= B <= F <= B+W and m >= 2p, the two of a pair run one after
    the other; at most p + 1/2 microbatches live on every rank, each until its last backward.
    """

    def program(rank: int, total: int) -> Iterator[str]:
        below = ranks - 1 - rank
        yield from ("F0",) * (2 * below)
        yield from ("F0", "F1") * (rank + 1)
        yield from ("b1", "W", "F1") * below
        yield from ("F0", "B1", "F1", "B0") * (total - ranks - below)
        yield from ("B1", "F1", "B0") * below
        last = ("B1", "B0") * (rank + 1)
        yield from last[: rank + 1]
        yield from map(str.lower, last[rank + 1 :])
        yield from ("W", "b0") * below
        yield from ("W",) * (rank + 1)

    return v_schedule(NAME, ranks, microbatches, program)


def min_microbatches(ranks: Array) -> Array:
    """With fewer microbatches the bubble is larger than the one that `build` states."""
    return 2 * ranks


def summarize(
    p: Array, m: Array, v: Array, forward: Array, backward: Array, weight: Array
) -> ScheduleSummary:
    idle, live = (p - 1) * np.maximum(forward + backward - weight, 0.0) / 2, np.minimum(p + 0.5, m)
    return ScheduleSummary(
        split_backward_idle(idle, p, m, v, forward, backward, weight), live, live
    )
