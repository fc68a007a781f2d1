"""Which samples of a global batch, and which positions of a sequence, each rank has. No torch.

batch 8, accumulate 2, data_size 2        microbatch 0    microbatch 1
                                 sample   0 1 | 2 3       4 5 | 6 7
                              data rank    0  |  1         0  |  1
"""

from __future__ import annotations

from .errors import LayoutError


def data_rank_indices(batch: int, accumulate: int, data_rank: int, data_size: int) -> list[int]:
    """The indices of a data rank's samples in the global batch, microbatch after microbatch.

    A microbatch consists of consecutive samples, and each data rank takes consecutive samples of
    it. So a microbatch has the same samples on every layout.

    Args:
        batch: Samples of the global batch.
        accumulate: Number of microbatches.
        data_rank: This rank's position among the data ranks.
        data_size: Number of data ranks.

    Raises:
        LayoutError: The batch does not divide.
    """
    parts = accumulate * data_size
    if batch < 1 or batch % parts:
        problem = f"does not divide into {accumulate} microbatches over {data_size} data ranks"
        raise LayoutError("batch", batch, problem, f"use a multiple of {parts}")
    size = batch // parts
    starts = ((micro * data_size + data_rank) * size for micro in range(accumulate))
    return [index for start in starts for index in range(start, start + size)]


def zigzag_spans(length: int, size: int) -> list[list[tuple[int, int]]]:
    """The (start, stop) that each of `size` ranks holds of a sequence: equal pieces from both ends,
    so that each has the same work under a causal mask (Llama 3, Dubey et al. 2024). One rank holds
    all of it. Raises LayoutError.

    length 8, size 2        0 1 | 6 7        2 3 | 4 5
    """
    if size == 1:
        return [[(0, length)]]
    if length % (2 * size):
        problem = f"its {length} positions do not divide into {2 * size} pieces, two for each rank"
        raise LayoutError("sequence", length, problem, f"use a multiple of {2 * size}")
    each = length // (2 * size)
    places = ((index, 2 * size - 1 - index) for index in range(size))
    return [[(place * each, (place + 1) * each) for place in pair] for pair in places]
