"""Which samples of a global batch are whose. Pure arithmetic; no torch.

batch 8, accumulate 2, data_size 2        microbatch 0    microbatch 1
                                 sample   0 1 | 2 3       4 5 | 6 7
                              data rank    0  |  1         0  |  1
"""

from __future__ import annotations

from .errors import LayoutError


def part(batch: int, accumulate: int, data_rank: int, data_size: int) -> list[int]:
    """Indices into the global batch that this data rank takes, its `accumulate` microbatches one after the other.

    A microbatch is a run of consecutive samples, and each data rank takes a run of it, so the samples of a microbatch
    are the same on every layout. Raises LayoutError if the batch does not divide.
    """
    parts = accumulate * data_size
    if batch < 1 or batch % parts:
        problem = f"does not divide into {accumulate} microbatches over {data_size} data ranks"
        raise LayoutError("batch", batch, problem, f"use a multiple of {parts}")
    size = batch // parts
    starts = ((micro * data_size + data_rank) * size for micro in range(accumulate))
    return [index for start in starts for index in range(start, start + size)]
