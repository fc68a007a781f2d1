"""Naive model parallel: one microbatch at a time, through all stages and back; all ranks but one
idle.

2 ranks, 2 microbatches     rank 0   0F0         0B0 0F1         0B1
                            rank 1       1F0 1B0         1F1 1B1
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

NAME = "naive"
SEARCHED = False  # it is there to compare with: gpipe is never slower


def build(ranks: int, microbatches: int) -> Schedule:
    """Bubble (p-1) m (F+B+W); one microbatch live per rank."""
    n = ranks, microbatches
    order = [
        interleave_columns(
            (0, microbatch_sweep("F", rank, *n)), (0, microbatch_sweep("B", rank, *n))
        )
        for rank in range(ranks)
    ]
    return Schedule(NAME, round_robin_placement(ranks), tuple(order))


def summarize(
    p: Array, m: Array, v: Array, forward: Array, backward: Array, weight: Array
) -> ScheduleSummary:
    return ScheduleSummary(
        (p - 1) * m * (forward + backward + weight), np.minimum(1, m), np.minimum(1, m)
    )
