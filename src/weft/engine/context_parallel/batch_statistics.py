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
) -> Any:
    """A mean, or a number of elements, of all ranks (`weft.nn.BatchNorm`). What is of no position,
    as an image, is the same on all ranks that share the sequence, and counts once."""
    x: Tensor = args[0]
    if 1 in dims_of_positions(x):  # each rank has other channels
        raise UnsupportedModel(
            "layout",
            str(sequence.layout),
            "a batch norm takes positions for channels, and each rank has some of them",
            "use dp or fsdp",
        )
    found = func(*args)
    if is_fixed(x):
        known.use()
        return found // sequence.size if isinstance(found, int) else set_fixed(found)
    if isinstance(found, int) and not is_marked(x):
        raise UnsupportedModel(
            "layout",
            str(sequence.layout),
            "whether a batch norm takes positions, or what all ranks have, as images, is not known"
            " where it runs",
            "use dp or fsdp",
        )
    return found
