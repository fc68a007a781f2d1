"""ZB-H1 (Qi et al. 2024): 1F1B with the weights' gradients (W) apart, which fill the gaps at the
end.

2 ranks, 2 microbatches     rank 0   0F0 0F1     0B0 0W0 0B1 0W1
                            rank 1       1F0 1B0 1F1 1B1 1W0 1W1
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

NAME = "zb-h1"


def build(ranks: int, microbatches: int) -> Schedule:
    """Bubble (p-1)(F+B-W) where W <= min(F, B) and m >= p; min(p, m) microbatches live on every
    rank, each until its W.

    Forwards run p - 1 - rank ahead of B as in 1F1B, and p - 1 ahead of W on all ranks.
    """
    order = []
    for rank in range(ranks):
        n = rank, ranks, microbatches
        order.append(
            interleave_columns(
                (0, microbatch_sweep("F", *n)),
                (ranks - 1 - rank, microbatch_sweep("B", *n)),
                (ranks - 1, microbatch_sweep("W", *n)),
            )
        )
    return Schedule(NAME, round_robin_placement(ranks), tuple(order))


def summarize(
    p: Array, m: Array, v: Array, forward: Array, backward: Array, weight: Array
) -> ScheduleSummary:
    idle = np.where(
        weight <= np.minimum(forward, backward),
        forward + backward - weight,
        np.maximum(forward, backward),
    )
    live = np.minimum(p, m)
    return ScheduleSummary(
        split_backward_idle((p - 1) * idle, p, m, v, forward, backward, weight), live, live
    )
