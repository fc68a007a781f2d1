"""What a forward takes from where a mask of positions is set, and what it puts there, as features
of images in the place of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor

from weft.core import UnsupportedModel

from .by_position import ARITHMETIC, numbers_positions
from .followed_calls import wholes
from .whole_marks import (
    dims_of_positions,
    forget_values,
    is_marked,
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
        layout: which is refused where a rank cannot know its own.
        cut: (what is of all positions, its dims of them) -> this rank's part.
        use: told where anything is other than it would be on a part.
    """

    def __init__(
        self,
        layout: str,
        cut: Callable[[Tensor, Iterable[int]], Tensor],
        use: Callable[[], None],
    ):
        self._layout, self._cut, self._use = layout, cut, use
        # of the masks of a forward: how many elements are set here and in all -> which of them are
        # set here; None: two masks have as many
        self._rows: dict[tuple[int, int], Tensor | None] = {}

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
        own, count = self._elements(mask, places.tensor)
        before = self._rows.setdefault((len(own), count), own)
        if before is not None and not torch.equal(before, own):
            self._rows[len(own), count] = None
        return set_whole_shape(part, (count, *rest))

    def scattered(
        self, func: Callable[..., Any], x: Tensor, mask: Tensor, source: Tensor
    ) -> Tensor | None:
        """`masked_scatter` from a source that all ranks have: this rank's positions take what
        comes after that of the positions before them. None: nothing is of positions."""
        whole, dims = whole_of(mask), dims_of_positions(x)
        if not dims or (whole is not None and whole_of(x) is not None):
            return None
        if whole is None or is_marked(source):
            raise self._refusal(
                "masked_scatter takes a mask or values that a rank knows at its own positions alone"
            )
        self._use()
        if not whole.tensor.any():  # the source may be empty
            return set_whole_shape(func(x, mask, source), whole_shape(x))
        rows, order = scattered_rows(whole.tensor, whole_shape(x), source)
        own = rows[self._cut(order, [dim for dim in dims if dim < order.ndim])].view(x.shape)
        made = torch.where(mask, own, x)
        if func is Tensor.masked_scatter_:
            forget_values(x)
            return x.copy_(made)
        return set_whole_shape(made, whole_shape(x))

    def own_rows(self, func: Callable[..., Any], args: tuple) -> tuple:
        """The arguments of a function, those of a row for each element of a mask cut to this
        rank's."""
        if func is Tensor.__setitem__:
            return self._set(*args)
        if self._rows and getattr(func, "__name__", "").strip("_").removeprefix("i") in ARITHMETIC:
            return tuple(self._own(x, args) for x in args)
        return args

    def _set(self, target: Tensor, index: Any, value: Any) -> tuple:
        """Of `target[index] = value`."""
        mask = masked_index(index)
        places = whole_of(mask)
        if whole_of(target) is not None or not dims_of_positions(target):
            return target, index, value
        if mask is not None and places is not None and isinstance(value, Tensor) and value.ndim:
            own, count = self._elements(mask, places.tensor)
            if not is_marked(value) and len(value) == count > 1:
                self._use()
                value = value[own]
        elif not (isinstance(value, Tensor) and is_marked(value)) and numbers_positions(
            target, index
        ):
            raise self._refusal("the model sets a value at positions that it numbers in Python")
        return target, index, value

    def rows(self, part: Tensor, whole: Tensor) -> Tensor | None:
        """Where `part` is of as many rows as a mask is set here, and `whole` as in all: which of
        them are this rank's."""
        if not part.ndim or not whole.ndim:
            return None
        key = len(part), len(whole)
        if key in self._rows and self._rows[key] is None:
            raise self._refusal(
                "two masks are set at equally many positions: which rows are meant is unclear"
            )
        return self._rows.get(key)

    def _own(self, x: Any, beside: tuple) -> Any:
        if not isinstance(x, Tensor) or is_marked(x):
            return x
        for part in beside:
            if isinstance(part, Tensor) and part.ndim == x.ndim and 0 in dims_of_positions(part):
                rows = self.rows(part, x)
                if rows is not None:
                    return x[rows]
        return x

    def _elements(self, mask: Tensor, whole: Tensor) -> tuple[Tensor, int]:
        """Which elements that are set in a whole mask are this rank's, int64; how many there are
        in all."""
        dims = dims_of_positions(mask)
        if not torch.equal(self._cut(whole, dims), mask):
            raise self._refusal("the positions of a mask stand in another order than in the batch")
        every = whole.flatten().cumsum(0).view(whole.shape)
        return self._cut(every, dims)[mask] - 1, int(whole.sum())

    def _refusal(self, problem: str) -> UnsupportedModel:
        return UnsupportedModel("layout", self._layout, problem, "use dp or fsdp")
