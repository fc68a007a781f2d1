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
    """Whether the keys [b, heads, s, d] are of no position, and the queries of this rank's or of
    none. Others are of some positions, as of the first two, which are others on each rank."""
    sequence.on_attention(query, key, value)
    if key.ndim != 4 or query.ndim != 4 or 2 in dims_of_positions(key):
        return False
    lost = not is_marked(key) and not sequence.are_parts(key)  # an operator is not followed
    own = is_marked(query) and 2 not in dims_of_positions(query)
    if own or not (is_fixed(key) or lost):
        return False
    known.use()
    return True


def attend_alone(
    core: Callable[..., Tensor], randomness: Randomness, query: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """`core`, whose weights [samples, heads, queries, keys] are dropped as on one device."""
    rows = randomness.rows
    here = rows is not None and not is_fixed(query) and query.shape[2] == len(rows)
    with drawn_in(randomness, *((rows, 2) if here else (None, None))):
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
    if is_marked(query):
        return set_whole_shape(out, (*whole_shape(query)[:-1], out.shape[-1]))
    return set_fixed(out) if is_fixed(query) else out
