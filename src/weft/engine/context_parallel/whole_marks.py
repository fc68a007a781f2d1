"""What is known of a tensor of this rank's positions: the shape that it has with all positions, and
perhaps what it holds there.

The dims of positions are those in which the two shapes differ: of a tensor of 8 heads and 8
positions here, [8, 16] with all positions tells which is which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Whole:
    """A tensor with all positions. `made`: it, or what makes it once it is asked for; None: it is
    not known here."""

    shape: tuple[int, ...]
    made: Tensor | Callable[[], Tensor] | None = None

    @property
    def tensor(self) -> Tensor:
        assert self.made is not None
        if not isinstance(self.made, Tensor):
            self.made = self.made()
        return self.made


def set_whole(part: Tensor, whole: Tensor | Whole) -> Tensor:
    """From now on `part` is a part of `whole`."""
    whole = Whole(_sizes(whole), whole) if isinstance(whole, Tensor) else whole
    part.weft_whole = whole, part.grad_fn  # type: ignore[attr-defined]
    if is_plain(part) and _sizes(part) != whole.shape:
        _layouts(part)[_layout(part)] = whole.shape
    return part


def set_whole_shape(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """From now on `part` has this shape with all positions."""
    return set_whole(part, Whole(shape))


def set_alike(x: Tensor) -> Tensor:
    """From now on `x` is known: it is of no position, and the same on every rank."""
    x.weft_alike = True  # type: ignore[attr-defined]
    return x


def is_alike(x: Tensor) -> bool:
    """Whether it is known to be of no position."""
    return getattr(x, "weft_alike", False) and not _forgotten(x)


def set_fixed(x: Tensor) -> Tensor:
    """From now on `x` and its views are of no position, as what is made of an image and weights."""
    if is_plain(x):
        x.untyped_storage().weft_fixed = True  # type: ignore[attr-defined]
    return x


def forget_fixed(x: Tensor) -> Tensor:
    """From now on `x` and its views may be of some positions."""
    if is_plain(x):
        x.untyped_storage().weft_fixed = False  # type: ignore[attr-defined]
    return x


def is_fixed(x: Tensor) -> bool:
    """Whether it is known to be of no position. Its values may need a gradient."""
    if is_marked(x):  # a slice of a sequence, or a sum over a part, may have its whole shape
        return False
    return is_alike(x) or (is_plain(x) and getattr(x.untyped_storage(), "weft_fixed", False))


def copy_mark(part: Tensor, fixed: bool, shape: tuple[int, ...]) -> Tensor:
    """A copy of what was known to be of no position, or had this shape with all positions."""
    return set_fixed(part) if fixed else set_whole_shape(part, shape)


def whole_of(part: Any) -> Whole | None:
    """What this is a part of, where it is known on this rank. Of no position: a copy, for others
    may share its memory."""
    if not isinstance(part, Tensor):
        return None
    if is_alike(part):
        return Whole(_sizes(part), part.clone)
    whole, made_by = getattr(part, "weft_whole", (None, None))
    # an autograd.Function, as FSDP2 calls around a unit, gives its result a gradient afterwards,
    # which the whole one does not have
    known = whole is not None and whole.made is not None and part.grad_fn is made_by
    return whole if known and not _forgotten(part) else None


def whole_shape(part: Tensor) -> tuple[int, ...]:
    """The shape with all positions. What an autograd.Function hands on unchanged is another object
    and the same memory: it is found by that."""
    whole, _ = getattr(part, "weft_whole", (None, None))
    if whole is not None:
        return whole.shape  # type: ignore[no-any-return]
    shape = _sizes(part)
    if not is_plain(part) or part._base is None:
        return shape
    return _layouts(part).get(_layout(part), shape)


def is_marked(part: Tensor) -> bool:
    """Whether anything is known of it."""
    return hasattr(part, "weft_whole") or whole_shape(part) != _sizes(part)


def dims_of_positions(part: Tensor) -> list[int]:
    """The dims that are longer with all positions."""
    return [
        d for d, (x, y) in enumerate(zip(_sizes(part), whole_shape(part), strict=True)) if x != y
    ]


def forget_values(part: Tensor) -> None:
    """What `part` holds is of this rank from now on, and what all views of its memory hold; shapes
    stay."""
    if is_plain(part):
        part.untyped_storage().weft_forgotten = True  # type: ignore[attr-defined]
    elif hasattr(part, "weft_whole"):
        set_whole_shape(part, whole_shape(part))


def _forgotten(part: Tensor) -> bool:
    return is_plain(part) and getattr(part.untyped_storage(), "weft_forgotten", False)


def is_plain(x: Tensor) -> bool:
    """Whether it is a tensor of torch's own, with memory."""
    return type(x) in (Tensor, nn.Parameter) and not x.is_meta and x.layout is torch.strided


def tensors_of(values: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from tensors_of(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors_of(value)


def _sizes(x: Tensor) -> tuple[int, ...]:
    """Its shape; where a forward is followed, sizes would be those of all positions too."""
    return tuple(map(int, x.shape))


def _layouts(part: Tensor) -> dict[tuple, tuple[int, ...]]:
    base: Any = part if part._base is None else part._base
    if not hasattr(base, "weft_layouts"):
        base.weft_layouts = {}
    return base.weft_layouts  # type: ignore[no-any-return]


def _layout(part: Tensor) -> tuple:
    return part.storage_offset(), _sizes(part), part.stride()
