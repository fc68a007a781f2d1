"""Attention to keys that every rank has whole, as those of an image: no rank asks another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from weft.nn import Randomness

from .known_sequences import KnownSequences
from .sequence import ContextParallel
from .whole_marks import (
    dims_of_positions,
    is_fixed,
    is_marked,
    set_fixed,
    set_whole_shape,
    whole_shape,
)


def attends_alone(
    sequence: ContextParallel, known: KnownSequences, query: Tensor, key: Tensor, value: Tensor
) -> bool:
    """Whether the keys [b, heads, s, d] are known to be of no position."""
    sequence.attends(query, key, value)
    if key.ndim != 4 or 2 in dims_of_positions(key):
        return False
    if not is_fixed(key) and (is_marked(key) or sequence.are_parts(key)):
        return False  # of some positions, as the first two; or an operator was not followed
    known.use()
    return True


def attend_alone(
    core: Callable[..., Tensor], randomness: Randomness, query: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """`core`, whose weights [samples, heads, queries, keys] are dropped as on one device."""
    rows = (None, None) if is_fixed(query) else (randomness.rows, 2)
    with drawn_in(randomness, *rows):
        return core(query, *args, **kwargs)


@contextmanager
def drawn_in(randomness: Randomness, rows: Tensor | None, dim: int | None) -> Iterator[None]:
    """Within this context masks have these positions in this dim."""
    before = randomness.rows, randomness.rows_dim
    randomness.rows, randomness.rows_dim = rows, dim
    try:
        yield
    finally:
        randomness.rows, randomness.rows_dim = before


def attended_alone(out: Tensor, query: Tensor, *_: Any, **__: Any) -> Tensor:
    """What attention gave for queries of positions, or of none."""
    if is_fixed(query):
        return set_fixed(out)
    return set_whole_shape(out, (*whole_shape(query)[:-1], out.shape[-1]))
