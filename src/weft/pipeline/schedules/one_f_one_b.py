"""1F1B with flush (PipeDream-flush, Narayanan et al. 2021): as GPipe, but each backward as soon as
it can be.

2 ranks, 3 microbatches     rank 0   0F0 0F1     0B0 0F2 0B1     0B2
                            rank 1       1F0 1B0 1F1 1B1 1F2 1B2
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

NAME = "1f1b"


def build(ranks: int, microbatches: int) -> Schedule:
    """Bubble (p-1)(F+B+W); min(p - rank, m) microbatches live."""
    n = ranks, microbatches
    order = [
        interleave_columns(
            (0, microbatch_sweep("F", rank, *n)),
            (ranks - 1 - rank, microbatch_sweep("B", rank, *n)),
        )
        for rank in range(ranks)
    ]
    return Schedule(NAME, round_robin_placement(ranks), tuple(order))


def summarize(
    p: Array, m: Array, v: Array, forward: Array, backward: Array, weight: Array
) -> ScheduleSummary:
    return ScheduleSummary(
        (p - 1) * (forward + backward + weight), np.minimum(p, m), np.minimum(1, m)
    )
