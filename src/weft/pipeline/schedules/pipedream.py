"""PipeDream (Harlap et al. 2018; 2BW: Narayanan et al. 2021): 1F1B without a flush, stages update
on their own (U).

2 ranks, 3 microbatches     rank 0   0F0 0F1     0B0 0U0 0F2     0B1 0U1     0B2 0U2
                            rank 1       1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2
"""

from __future__ import annotations

from typing import get_args

import numpy as np

from weft.core import ConfigError, Schedule, Versions, nearest

from ._parts import (
    Array,
    ScheduleSummary,
    interleave_columns,
    microbatch_sweep,
    round_robin_placement,
)

NAME = "pipedream"


def build(ranks: int, microbatches: int, *, versions: Versions = "stash") -> Schedule:
    """`versions`: see `Schedule`. A stage updates after every microbatch; with "2bw" after every
    `ranks`, those left over joining the last update. Idle (p-1)(F+B+W), at the two ends of the call
    only. Raises ConfigError.
    """
    if versions not in (choices := [v for v in get_args(Versions) if v]):
        raise ConfigError(
            "pipeline.versions",
            versions,
            "not a way to keep weights",
            nearest(str(versions), choices),
        )
    updates = _groups(ranks, microbatches) if versions == "2bw" else range(microbatches)
    order = []
    for rank in range(ranks):
        n = rank, ranks, microbatches
        behind = ranks - 1 - rank
        steps = [u if u and u.microbatch in updates else None for u in microbatch_sweep("U", *n)]
        order.append(
            interleave_columns(
                (0, microbatch_sweep("F", *n)), (behind, microbatch_sweep("B", *n)), (behind, steps)
            )
        )
    return Schedule(NAME, round_robin_placement(ranks), tuple(order), versions)


def _groups(ranks: int, microbatches: int) -> set[int]:
    """The last microbatch of each group of at least `ranks`, or of the only one."""
    return {*range(ranks - 1, microbatches - ranks, ranks), microbatches - 1}


def summarize(
    p: Array, m: Array, v: Array, forward: Array, backward: Array, weight: Array
) -> ScheduleSummary:
    return ScheduleSummary(0.0 * p * forward, np.minimum(p, m), np.minimum(1, m))
