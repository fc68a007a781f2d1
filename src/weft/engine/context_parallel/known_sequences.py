"""What a rank knows of whole sequences: integers of the batch, counts of positions, constants, and
what a forward computes of them alone.

On a part of the positions a model would number, shift or pad that part, and make masks and biases
for pairs of positions that leave out the keys of other ranks. Every rank has the batch's tokens and
masks whole, so such values are computed for all positions, by the functions that one device calls.
The model sees those of its part; attention takes the rows of this rank's queries, with all keys.

Of every tensor the shape with all positions is followed (`whole_marks.py`), of activations too: so
it is known which of their sizes count positions (`position_counts.py`), and what is made of these.
Where a known value meets activations, which have this rank's positions alone, the part goes on.
Values for pairs of positions [..., s, s] are made whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .by_position import ARITHMETIC, by_position
from .counts_by_size import CountsBySize
from .followed_calls import (
    SIZES,
    are_fixed,
    changes_first,
    counted_shape,
    counts_positions,
    has_effects,
    map_arguments,
    stands_for_a_mask,
    whole_argument,
    wholes,
    with_counts,
)
from .followed_shapes import FollowedShapes
from .masked_values import PICKS, SCATTERS, MaskedValues, masked_index
from .own_positions import OwnPositions
from .own_reads import OwnReads
from .position_counts import whole_number
from .whole_marks import (
    Whole,
    dims_of_positions,
    forget_fixed,
    forget_values,
    is_alike,
    is_marked,
    is_plain,
    set_alike,
    set_fixed,
    set_whole,
    set_whole_shape,
    tensors_of,
    whole_of,
    whole_shape,
)

_CONSTANTS = {
    *(torch.zeros, torch.ones, torch.full, torch.empty, Tensor.new_zeros, Tensor.new_ones),
    *(Tensor.new_full, Tensor.new_empty, torch.zeros_like, torch.ones_like, torch.full_like),
    torch.empty_like,
}
_FULL = {torch.full, Tensor.new_full, torch.full_like}
# functions that give Python what tensors hold
_READS = {
    *(torch.equal, torch.allclose, torch.is_nonzero, Tensor.equal, Tensor.allclose),
    *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.is_nonzero, Tensor.__contains__),
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__),
}
_LOOKS_UP = {
    *(F.embedding, Tensor.__getitem__, torch.index_select, Tensor.index_select),
    *(torch.gather, Tensor.gather, torch.take_along_dim, Tensor.take_along_dim),
}
# another tensor says what shape they give
_SHAPED = {
    Tensor.expand_as: Tensor.expand,
    Tensor.view_as: Tensor.view,
    Tensor.reshape_as: Tensor.reshape,
}
_NO_WHOLE = (RuntimeError, IndexError, TypeError, ValueError)


class KnownSequences:
    """Calls functions of torch in a forward of a part of the positions.

    Args:
        length: positions of a whole sequence.
        mine: those of this rank, int64 [positions here].
        shapes: follows the shapes of activations.
        made: (placeholder of a mask) -> the mask for all positions.
        counts: what numbers positions where nothing is followed.
        layout: which is refused where a rank cannot know its own positions.

    Attributes:
        used: whether anything was other than it would be if nothing were followed. If not, the
            next forward of the same shapes need not be followed.
        own_reads: where Python gets numbers that are of this rank's positions alone.
    """

    def __init__(
        self,
        length: int,
        mine: Tensor,
        shapes: FollowedShapes,
        made: Callable[[Tensor], Tensor],
        counts: CountsBySize | None = None,
        layout: str = "",
    ):
        self._own = OwnPositions(length, mine)
        self._shapes, self._made, self._counts = shapes, made, counts
        self.used, self.own_reads = False, OwnReads()
        self._masked = MaskedValues(layout, self._own.cut, self.use)

    def begin(self) -> None:
        """Another forward of the same shapes begins."""
        self._masked.forget()

    def use(self) -> None:
        self.used = True

    def __call__(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """What `func` gives for this rank's positions, known for all where its arguments are."""
        if func is Tensor.__iter__:
            return iter(self(Tensor.unbind, args, kwargs))
        name = getattr(func, "__name__", "")
        if name == "__get__" or func in SIZES:
            found = func(*args, **kwargs)
            if not isinstance(found, Tensor):
                return with_counts(func, found, args, kwargs, self.use)
        if func in _SHAPED and len(args) == 2:
            return self(_SHAPED[func], (args[0], counted_shape(args[1], self.use)), {})
        tensors = [*tensors_of((args, kwargs))]
        if any(stands_for_a_mask(x) for x in tensors):
            self.use()
            args, kwargs = map_arguments((args, kwargs), self._unfolded)
            tensors = [*tensors_of((args, kwargs))]
        if func in _CONSTANTS and "out" not in kwargs:
            return self._constant(func, args, kwargs)
        counted = counts_positions((args, kwargs))
        if not counted and not any(is_marked(x) for x in tensors):
            return self._of_no_position(func, args, kwargs, tensors)
        if name == "__set__" or has_effects(func):  # once, and nobody knows what it writes
            for x in tensors:
                forget_values(x)
            return func(*args, **kwargs)
        if counted and name.strip("_") in ARITHMETIC:
            self.use()
            args, kwargs = map_arguments((args, kwargs), whole_number)
        known = [x for x in tensors if whole_of(x) is not None]
        if func in SCATTERS and (made := self._masked.scattered(func, *args, **kwargs)) is not None:
            return made
        if len(known) < len(tensors):
            args = self._masked.own_rows(func, args)
        if changes_first(func):
            return self._in_place(args[0], func, args, kwargs)
        if whole_of(kwargs.get("out")) is not None:
            return self._in_place(kwargs["out"], func, args, kwargs)
        if func in _READS and len(known) == len(tensors):
            self.use()
            return func(*wholes(args), **wholes(kwargs))
        if func in _READS and any(is_marked(x) and whole_of(x) is None for x in tensors):
            self.own_reads.note()
        if func in PICKS and len(args) == 2 and masked_index(args[1]) is not None:
            return self._masked.picked(func, *args)
        if func in _LOOKS_UP and len(known) == len(tensors) > 1:
            return self._looked_up(func, args, kwargs)
        part = func(*args, **kwargs)
        if not any(True for _ in tensors_of(part)):
            return part
        if self._goes_on(func, part, tensors, counted):
            try:
                whole = func(*wholes(args), **wholes(kwargs))
            except _NO_WHOLE:
                pass  # of other sizes than positions
            else:
                if self._is_the_part(part, whole, func, args, kwargs):
                    return set_whole(part, whole)
                found = self._joined(part, whole)
                if not self._same_unfollowed(found, func, args, kwargs):
                    self.use()
                return found
        return self.mark(part, func, args, kwargs)

    def mark(self, made: Any, func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Note the shape with all positions of what `func` gave, or that it is of none."""
        given = [*tensors_of((args, kwargs))]
        if any(map(is_marked, given)) or counts_positions((args, kwargs)):
            self._shapes.mark(made, func, args, kwargs)
        elif are_fixed(given):
            for x in tensors_of(made):
                set_fixed(x)
        return made

    def drawn(self, made: Any, func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """As `mark`, of random numbers: the same on every rank where their shape is a constant."""
        given = args, kwargs
        if isinstance(made, Tensor) and not counts_positions(given) and not [*tensors_of(given)]:
            return set_alike(made)
        return self.mark(made, func, args, kwargs)

    def rows(self, part: Tensor) -> Tensor | None:
        """Of pairs of positions [..., queries, keys], those of this rank's queries with all keys;
        None where those are not known."""
        whole = whole_of(part)
        if whole is None or len(whole.shape) != part.ndim:
            return None
        dims = dims_of_positions(part)
        last = part.ndim - 1
        if last not in dims or not {*dims} <= {last - 1, last}:
            return None
        self.use()
        return self._own.cut(whole.tensor, [dim for dim in dims if dim != last])

    # ---- what is computed of them ----------------------------------------------------------------

    def _constant(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Tensor:
        fill: Any = 1.0 if "ones" in func.__name__ else 0.0
        if func in _FULL:
            given = kwargs["fill_value"] if "fill_value" in kwargs else args[-1]
            fill = whole_number(given)
            if fill is not given:
                self.use()
            if "fill_value" in kwargs:
                kwargs = {**kwargs, "fill_value": fill}
            else:
                args = *args[:-1], fill
        made: Tensor = func(*args, **kwargs)
        shapes = self._shapes.shapes(func, args, kwargs)
        if shapes is None:
            return made
        if shapes[0] == made.shape:  # a collective may write into an empty one, which is not seen
            return made if "empty" in func.__name__ else set_alike(made)
        if "empty" in func.__name__:
            made.zero_()  # as the whole: a view of it is found by what it holds
        options = {"dtype": made.dtype, "device": made.device}
        return set_whole(made, Whole(shapes[0], partial(torch.full, shapes[0], fill, **options)))

    def _of_no_position(
        self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        """Constants, and what is made of them alone, are known."""
        found = func(*args, **kwargs)
        counts = self._counts if func is torch.arange else None
        if counts is not None and not torch.equal(found, counts(func, args, kwargs)):
            self.use()
        if has_effects(func) or not all(map(is_alike, tensors)):
            if has_effects(func) or changes_first(func) or "out" in kwargs:
                for x in tensors:
                    forget_values(x)
            elif are_fixed(tensors):
                for x in tensors_of(found):
                    set_fixed(x)
            return found
        for x in tensors_of(found):
            if is_plain(x) and not x.requires_grad:
                set_alike(x)
        return found

    def _unfolded(self, x: Any) -> Any:
        if not stands_for_a_mask(x):
            return x
        whole = self._made(x)  # [samples, 1, positions, positions]
        return set_whole(self._own.cut(whole, (2, 3)), whole)

    def _looked_up(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Places in the whole sequence are none in the part."""
        self.use()
        whole = func(*wholes(args), **wholes(kwargs))
        here = self._shapes.shapes(func, args, kwargs, whole=False)
        if here is None:  # as many as the values say
            return whole
        return self._joined(whole.new_empty(here[0]), whole)

    def _goes_on(
        self, func: Callable[..., Any], part: Any, tensors: list[Tensor], counted: bool
    ) -> bool:
        """Whether all arguments of a function, one of them a number of positions if `counted`, are
        known for all positions. A weight beside them is the same on all ranks: it goes on where it
        is sliced, added and the like, or looked up for pairs, as `mask[positions, :length]`. Tokens
        are not embedded on every rank for all positions."""
        known = [x for x in tensors if whole_of(x) is not None]
        others = [x for x in tensors if whole_of(x) is None]
        if any(is_marked(x) or not (is_plain(x) or not x.ndim) for x in others):
            return False
        if not known and others:
            return func in _LOOKS_UP
        if not any(x.ndim for x in others):
            return True
        if func in _LOOKS_UP:
            return max(len(dims_of_positions(x)) for x in known) + counted > 1
        if not isinstance(part, Tensor):
            return False
        try:
            return part.shape == torch.broadcast_shapes(*(x.shape for x in tensors))
        except RuntimeError:
            return False

    def _in_place(
        self, target: Tensor, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """`target`: the argument that the function changes."""
        rest = [x for x in tensors_of((args, kwargs)) if x is not target]
        whole = whole_of(target)
        if whole is None:
            made = func(*args, **kwargs)
            self._shapes.mark(made, func, args, kwargs)
            if any(is_marked(x) and whole_of(x) is None for x in rest) and is_plain(target):
                set_whole_shape(forget_fixed(target), whole_shape(target))  # of activations now
            return made
        if target.requires_grad or any(x.ndim and whole_of(x) is None for x in rest):
            made = func(*args, **kwargs)
            forget_values(target)  # or the part's gradient would be that of a step on the part
            if any(is_marked(x) and whole_of(x) is None for x in rest):
                set_whole_shape(target, whole_shape(target))
            return made
        self.use()
        base, changed = target._base, whole.tensor
        more, named = map_arguments(
            (args, kwargs), lambda x: changed if x is target else whole_argument(x)
        )
        try:
            func(*more, **named)
        except _NO_WHOLE:
            made = func(*args, **kwargs)
            forget_values(target)
            return made
        try:
            made = func(*args, **kwargs)
        except _NO_WHOLE:
            if not self._own.are_all(target, whole.shape):
                raise
            made = None if func is Tensor.__setitem__ else target  # it takes all positions at once
        with torch.no_grad():
            if self._own.are_all(target, whole.shape):
                target.copy_(self._own.cut(changed, dims_of_positions(target)))
            elif isinstance(base, Tensor) and (known := whole_of(base)) is not None:
                # slices of a part are of other positions
                base.copy_(self._own.cut(known.tensor, dims_of_positions(base)))
        return made

    def _is_the_part(
        self, part: Any, whole: Any, func: Callable[..., Any], args: tuple, kwargs: dict
    ) -> bool:
        """Whether what was made of the part is the part of what was made for all positions: it
        stays, for it may be a view."""
        if not isinstance(part, Tensor) or not isinstance(whole, Tensor):
            return False
        if part.ndim != whole.ndim or part.shape == whole.shape:
            return False
        attribute = getattr(func, "__name__", "") == "__get__"  # as x.T or x.data
        return (attribute or by_position(func, args, kwargs)) and self._own.are_all(
            part, whole.shape
        )

    def _same_unfollowed(
        self, found: Any, func: Callable[..., Any], args: tuple, kwargs: dict
    ) -> bool:
        """Whether the function gives the same where nothing is followed."""
        if func is torch.arange:
            return self._counts is not None and torch.equal(found, self._counts(func, args, kwargs))
        return by_position(func, args, kwargs)

    def _joined(self, part: Any, whole: Any) -> Any:
        """What the model sees of what was made for all positions."""
        if isinstance(part, tuple | list) and len(part) == len(whole):
            return type(part)([self._joined(x, y) for x, y in zip(part, whole, strict=True)])
        if not isinstance(part, Tensor) or not isinstance(whole, Tensor):
            return part
        if part.shape == whole.shape:  # of no position: as the last token, or their number
            return set_fixed(whole) if whole.requires_grad else set_alike(whole)
        if part.ndim != whole.ndim:
            return part
        if not self._own.are_all(part, whole.shape):
            rows = self._masked.rows(part, whole)
            if rows is not None:
                return set_whole(whole[rows], whole)
            return set_whole(part, whole)  # a slice, from which a sequence may come again
        dims = [d for d, (x, y) in enumerate(zip(part.shape, whole.shape, strict=True)) if x != y]
        mine = self._own.cut(whole, dims)
        if part._base is not None and torch.allclose(part, mine, 0, 0, equal_nan=True):
            mine = part  # a view: what is written through it is to be seen
        return set_whole(mine, whole)
