"""Batch norms where ranks share the sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from weft.core import UnsupportedModel

from .known_sequences import KnownSequences
from .sequence import ContextParallel
from .whole_marks import dims_of_positions, is_fixed, is_marked, set_fixed


def of_all_ranks(
    sequence: ContextParallel, known: KnownSequences, func: Callable[..., Any], args: tuple
) -> tuple[Tensor, Tensor]:
    """Sums and the number of elements of all ranks (`weft.nn.batch_sums`). What is of no position,
    as an image, is the same on all ranks that share the sequence, and counts once."""
    x: Tensor = args[0]
    if 1 in dims_of_positions(x):  # each rank has other channels
        raise UnsupportedModel(
            "layout",
            str(sequence.layout),
            "a batch norm takes positions for channels, and each rank has some of them",
            "use dp or fsdp",
        )
    if not is_fixed(x) and not is_marked(x):
        raise UnsupportedModel(
            "layout",
            str(sequence.layout),
            "whether a batch norm takes positions, or what all ranks have, as images, is not known"
            " where it runs",
            "use dp or fsdp",
        )
    sums, count = func(*args)
    if not is_fixed(x):
        return sums, count
    known.use()
    return set_fixed(sums / sequence.size), set_fixed(count / sequence.size)
