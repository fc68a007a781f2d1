"""Looped breadth-first (Lamy-Poirier 2023): all microbatches through one chunk, then all through
the next. The weights of a chunk are then needed in one stretch of time, which suits weights that
are gathered (FSDP).

2 ranks, 2 microbatches     rank 0   0F0 0F1 2F0 2F1         2B0 2B1 0B0 0B1
                            rank 1       1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
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
)

NAME = "bfs"


def build(ranks: int, microbatches: int, *, chunks: int = 2) -> Schedule:
    """Bubble (p-1)(F+B+W)/v where m >= p; m microbatches live."""
    placement = round_robin_placement(ranks, chunks)
    order = []
    for rank in range(ranks):
        n = rank, ranks, microbatches, chunks
        order.append(
            interleave_columns(
                (0, microbatch_sweep("F", *n)), (chunks * microbatches, microbatch_sweep("B", *n))
            )
        )
    return Schedule(NAME, placement, tuple(order))


def summarize(
    p: Array, m: Array, v: Array, forward: Array, backward: Array, weight: Array
) -> ScheduleSummary:
    rounds = (p - 1) + (v - 1) * np.maximum(
        p - m, 0
    )  # a microbatch is back at the first rank after p
    return ScheduleSummary(rounds * (forward + backward + weight) / v, m, m)
