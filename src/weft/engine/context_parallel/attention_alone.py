"""Attention to keys that every rank has whole, as those of an image: no rank asks another."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .known_sequences import KnownSequences
from .sequence import ContextParallel
from .whole_marks import dims_of_positions, is_fixed, set_fixed, set_whole_shape, whole_shape


def attends_alone(
    sequence: ContextParallel, known: KnownSequences, query: Tensor, key: Tensor, value: Tensor
) -> bool:
    """Whether the keys [b, heads, s, d] are known to be of no position."""
    sequence.attends(query, key, value)
    if key.ndim != 4 or 2 in dims_of_positions(key):
        return False
    lost = not is_fixed(key) and key.shape[2] == query.shape[2]
    if lost and sequence.are_parts(query):  # by an operator that is not followed
        return False
    known.use()
    return True


def attended_alone(out: Tensor, query: Tensor, *_: Any, **__: Any) -> Tensor:
    """What attention gave for queries of positions, or of none."""
    if is_fixed(query):
        return set_fixed(out)
    return set_whole_shape(out, (*whole_shape(query)[:-1], out.shape[-1]))
