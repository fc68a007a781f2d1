"""What a forward takes from where a mask of positions is set, and what it puts there, as features
of images in the place of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor

from .by_position import ARITHMETIC
from .followed_calls import wholes
from .whole_marks import (
    dims_of_positions,
    forget_values,
    set_whole,
    set_whole_shape,
    whole_of,
    whole_shape,
)

PICKS = {Tensor.__getitem__, torch.masked_select, Tensor.masked_select}
SCATTERS = {torch.masked_scatter, Tensor.masked_scatter, Tensor.masked_scatter_}


def scattered_rows(mask: Tensor, shape: tuple[int, ...], source: Tensor) -> tuple[Tensor, Tensor]:
    """`masked_scatter` gives each element of the mask that is set the next one of the source.

    Args:
        mask: bool, which expands to `shape`.
        shape: of the tensor that is changed.
        source: at least as many elements as are set.

    Returns:
        The source as rows [rows, width], and which of them an element of the mask takes if it is
        set: int64 [*shape without the dims of which a row has all].
    """
    mask = mask.expand(shape)
    kept = len(shape)
    while kept and (shape[kept - 1] == 1 or mask.stride(kept - 1) == 0):
        kept -= 1
    width = prod(shape[kept:])
    each = mask[(..., *[0] * (len(shape) - kept))]
    rows = source.reshape(-1)[: source.numel() // width * width].reshape(-1, width)
    order = each.flatten().cumsum(0).sub(1).clamp_(min=0).view(each.shape)
    return rows, order


def masked_index(index: Any) -> Tensor | None:
    """The mask of `x[mask]` or `x[mask, :]`; None of other indexes."""
    mask, *rest = index if isinstance(index, tuple) else (index,)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not mask.ndim:
        return None
    every = (slice(None), Ellipsis)
    return mask if all(any(x is y or x == y for y in every) for x in rest) else None


class MaskedValues:
    """What a forward does with the positions of a mask.

    Where `x[mask]` is added to, or replaced by, a row for each element of the whole mask, as
    features of an image, this rank takes the rows of its own positions.

    Args:
        cut: (what is of all positions, its dims of them) -> this rank's part.
        use: told where anything is other than it would be on a part.
    """

    def __init__(self, cut: Callable[[Tensor, Iterable[int]], Tensor], use: Callable[[], None]):
        self._cut, self._use = cut, use
        self._rows: dict[tuple[int, int], Tensor | None] = {}  # by their numbers here and in all

    def forget(self) -> None:
        """Another forward begins."""
        self._rows.clear()

    def picked(self, func: Callable[..., Any], x: Tensor, index: Any) -> Tensor:
        """`x[mask]`: how many there are follows from the whole mask."""
        part: Tensor = func(x, index)
        mask = masked_index(index)
        whole, places = whole_of(x), whole_of(mask)
        if mask is None or places is None:
            return part
        self._use()
        if whole is not None:
            return set_whole(part, func(whole.tensor, wholes(index)))
        rest = whole_shape(x)[mask.ndim :] if func is Tensor.__getitem__ else ()
        return set_whole_shape(part, (self._note(mask, places.tensor), *rest))

    def scattered(
        self, func: Callable[..., Any], x: Tensor, mask: Tensor, source: Tensor
    ) -> Tensor | None:
        """`masked_scatter` from a source that all ranks have: this rank's positions take what
        comes after that of the positions before them. None: it is another source, or nothing is
        known of the mask."""
        whole, dims = whole_of(mask), dims_of_positions(x)
        if whole is None or not dims or dims_of_positions(source):
            return None
        self._use()
        rows, order = scattered_rows(whole.tensor, whole_shape(x), source)
        own = rows[self._cut(order, [dim for dim in dims if dim < order.ndim])].view(x.shape)
        made = torch.where(mask, own, x)
        if func is Tensor.masked_scatter_:
            forget_values(x)
            return x.copy_(made)
        return set_whole_shape(made, whole_shape(x))

    def own_rows(self, func: Callable[..., Any], name: str, args: tuple) -> tuple:
        """The arguments of a function, those of a row for each element of a mask cut to this
        rank's."""
        if name in ARITHMETIC or name[1:] in ARITHMETIC:
            return tuple(self._own(x, args) for x in args) if self._rows else args
        mask = masked_index(args[1]) if func is Tensor.__setitem__ else None
        places = whole_of(mask)
        if mask is None or places is None or not isinstance(args[2], Tensor):
            return args
        target, index, value = args
        if value.ndim and not dims_of_positions(value):
            self._use()
            count = self._note(mask, places.tensor)
            part = set_whole_shape(target[index], (count, *value.shape[1:]))
            return target, index, self._own(value, (part,))
        return args

    def _own(self, x: Any, beside: tuple) -> Any:
        if not isinstance(x, Tensor) or not x.ndim or dims_of_positions(x):
            return x
        for part in beside:
            if isinstance(part, Tensor) and part.ndim == x.ndim and 0 in dims_of_positions(part):
                rows = self._rows.get((len(part), len(x)))
                if rows is not None:
                    return x[rows]
        return x

    def _note(self, mask: Tensor, whole: Tensor) -> int:
        """How many elements of a whole mask are set."""
        every = whole.flatten().cumsum(0).view(whole.shape)
        own, count = self._cut(every, dims_of_positions(mask))[mask] - 1, int(whole.sum())
        before = self._rows.setdefault((len(own), count), own)
        if before is not None and not torch.equal(before, own):
            self._rows[len(own), count] = None  # of two masks: which is meant cannot be told
        return count
