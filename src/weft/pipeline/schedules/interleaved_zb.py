"""Interleaved zero bubble: interleaved 1F1B with B and W apart (Qi et al. 2024), `chunks` stages
per rank.

2 ranks, 2 microbatches     rank 0   0F0 0F1 2F0 2F1     2B0 2W0 2B1 2W1 0B0 0W0 0B1 0W1
                            rank 1       1F0 1F1 3F0 3B0 3F1 3B1 3W0 1B0 3W1 1B1 1W0 1W1
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

NAME = "interleaved-zb"


def build(ranks: int, microbatches: int, *, chunks: int = 2) -> Schedule:
    """Bubble (p-1)(F+B-W)/v where W <= min(F, B) and p divides m; min(p, m) microbatches live on
    every rank, each until its W.
    """
    placement = round_robin_placement(ranks, chunks)
    order = []
    for rank in range(ranks):
        n = rank, ranks, microbatches, chunks, ranks
        ahead = chunks * ranks - 1
        order.append(
            interleave_columns(
                (0, microbatch_sweep("F", *n)),
                (ahead - rank, microbatch_sweep("B", *n)),
                (ahead, microbatch_sweep("W", *n)),
            )
        )
    return Schedule(NAME, placement, tuple(order))


def microbatch_multiple(ranks: Array) -> Array:
    """Any number of microbatches runs; a last group that is not full leaves a larger bubble."""
    return ranks


def summarize(
    p: Array, m: Array, v: Array, forward: Array, backward: Array, weight: Array
) -> ScheduleSummary:
    idle, live = (p - 1) * (forward + backward - np.minimum(weight, backward)) / v, np.minimum(p, m)
    return ScheduleSummary(
        split_backward_idle(idle, p, m, v, forward, backward, weight), live, live
    )
