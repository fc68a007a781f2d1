"""Batches of samples of like length, of which less is padding.

An epoch in shuffled order is cut into pools of several batches. Each pool is sorted by length and
cut into batches; the batches of an epoch are shuffled.

    lengths    7 3 9 1 2 8 4 6 5
    pools      7 3 9 1 | 2 8 4 6 | 5     batch 2, pools of 2 batches
    batches    1 3 | 7 9 | 2 4 | 6 8     what is left over is in none
    epoch      2 4 | 7 9 | 6 8 | 1 3
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core import DataError

NUMBERS = "iuf"  # kinds of numpy


def sample_lengths(dataset: Any) -> NDArray[Any]:
    """The length of each sample: what the dataset's `lengths` say, one number for each; else each
    is read, and its length is how many elements it has. Raises DataError."""
    said: Sequence[Any] | None = getattr(dataset, "lengths", None)
    if said is None:
        samples = (dataset[index] for index in range(len(dataset)))
        counts = (sum(value.numel() for value in sample.values()) for sample in samples)
        return np.fromiter(counts, np.int64, len(dataset))
    try:
        found = np.asarray(said)
        fits = found.dtype.kind in NUMBERS and found.shape == (len(dataset),)
        fits = fits and bool(np.isfinite(found).all())
    except ValueError:  # rows of several lengths
        fits = False
    if not fits:
        problem = f"are not {len(dataset)} finite numbers, one for each sample"
        raise DataError(
            "the dataset's lengths",
            type(said).__name__,
            problem,
            "return one finite number for each sample",
        )
    return found


def grouped_by_length(
    order: NDArray[np.int64],
    lengths: NDArray[Any],
    batch: int,
    pool: int,
    random: np.random.Generator,
) -> NDArray[np.int64]:
    """An epoch's order, so that the samples of a batch have like lengths.

    Args:
        order: the samples as they are shuffled.
        lengths: of each sample.
        batch: samples of a batch.
        pool: how many batches are sorted together.
        random: shuffles the batches.
    """
    whole = len(order) // batch * batch
    starts = range(0, whole, pool * batch)
    pools = [order[start : min(start + pool * batch, whole)] for start in starts]
    ordered = [each[np.argsort(lengths[each], kind="stable")] for each in pools]
    batches = np.concatenate(ordered).reshape(-1, batch)
    return np.concatenate([random.permutation(batches).reshape(-1), order[whole:]])
