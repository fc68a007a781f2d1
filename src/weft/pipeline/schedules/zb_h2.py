"""ZB-H2 (Qi et al. 2024): ZB-H1 with twice the forwards ahead, so that no rank waits between its
first F and last W.

2 ranks, 3 microbatches     rank 0   0F0 0F1 0F2 0B0 0W0 0B1 0W1 0B2 0W2
                            rank 1       1F0 1B0 1F1 1B1 1F2 1B2 1W0 1W1 1W2
"""

from __future__ import annotations

import numpy as np

from weft.core import Schedule

from ._parts import (
    Array,
    ScheduleSummary,
    interleave_columns,
    microbatch_sweep,
    round_robin_placement,
    split_backward_idle,
)

NAME = "zb-h2"


def build(ranks: int, microbatches: int) -> Schedule:
    """Bubble (p-1) max(F, F+B-2W) where W <= min(F, B) and m >= 2p - 1, of which a rank has (p-1)
    max(0, F+B-2W) between its first and last action; min(2p - 1, m) microbatches live on every
    rank, each until its W.
    """
    order = []
    for rank in range(ranks):
        n = rank, ranks, microbatches
        warm = 2 * (ranks - 1 - rank)
        order.append(
            interleave_columns(
                (0, microbatch_sweep("F", *n)),
                (warm, microbatch_sweep("B", *n)),
                (2 * (ranks - 1), microbatch_sweep("W", *n)),
            )
        )
    return Schedule(NAME, round_robin_placement(ranks), tuple(order))


def min_microbatches(ranks: Array) -> Array:
    """With fewer microbatches the bubble is larger than the one that `build` states."""
    return 2 * ranks - 1


def summarize(
    p: Array, m: Array, v: Array, forward: Array, backward: Array, weight: Array
) -> ScheduleSummary:
    idle, live = (
        (p - 1) * np.maximum(forward, forward + backward - 2 * weight),
        np.minimum(2 * p - 1, m),
    )
    return ScheduleSummary(
        split_backward_idle(idle, p, m, v, forward, backward, weight), live, live
    )
