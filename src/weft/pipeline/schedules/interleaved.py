"""Interleaved 1F1B (Narayanan et al. 2021, Megatron's order): `chunks` stages per rank, `ranks`
microbatches at a time.

2 ranks, 2 microbatches     rank 0   0F0 0F1 2F0 2F1     2B0     2B1 0B0 0B1
                            rank 1       1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
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

NAME = "interleaved"


def build(ranks: int, microbatches: int, *, chunks: int = 2) -> Schedule:
    """Bubble (p-1)(F+B+W)/v where p divides m; p + (p-1)/v microbatches live on the first rank."""
    placement = round_robin_placement(ranks, chunks)
    order = []
    for rank in range(ranks):
        n = rank, ranks, microbatches, chunks, ranks
        warm = (chunks - 1) * ranks + 2 * (ranks - 1 - rank)
        order.append(
            interleave_columns((0, microbatch_sweep("F", *n)), (warm, microbatch_sweep("B", *n)))
        )
    return Schedule(NAME, placement, tuple(order))


def microbatch_multiple(ranks: Array) -> Array:
    """Any number of microbatches runs; a last group that is not full leaves a larger bubble."""
    return ranks


def summarize(
    p: Array, m: Array, v: Array, forward: Array, backward: Array, weight: Array
) -> ScheduleSummary:
    whole = forward + backward + weight
    ragged = np.where(m % p > 0, (v - 1) * (p - m % p) * whole / v, 0.0)
    return ScheduleSummary(
        (p - 1) * whole / v + ragged,
        np.minimum(p + (p - 1) / v, m),
        np.minimum(((v - 1) * p + 1) / v, m),
    )
