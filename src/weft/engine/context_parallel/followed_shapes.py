"""The shapes that tensors of a forward have with all positions.

Each function runs once more on tensors without elements, of the shapes with all positions, and what
it gives there is kept for the same arguments. So which dims are of positions follows from what the
model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from weft._torch.modes import without_function_modes

from .position_counts import PositionCount, whole_number
from .whole_marks import is_plain, set_whole_shape, tensors_of, whole_shape

Shapes = list[tuple[int, ...]]
MOST = 20_000  # calls whose shapes are kept: a number that changes with each step makes others

# functions that may run where tensors without elements do not: on another device, or with a tensor
# of which nothing is known, whose dims beside one of positions are of positions too
_ELEMENTWISE = {
    *("add", "sub", "mul", "div", "true_divide", "where", "maximum", "minimum", "lerp", "to"),
    *("cpu", "cuda", "type", "type_as", "masked_fill", "dropout"),
}


class FollowedShapes:
    """Marks what functions give with the shape that it has with all positions."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Shapes | None] = {}

    def mark(self, made: Any, func: Callable[..., Any], args: tuple, kwargs: dict) -> None:
        """`made`: what `func` gave for this rank's positions."""
        results = [x for x in tensors_of(made) if is_plain(x)]
        if not results:
            return
        shapes = self.shapes(func, args, kwargs)
        if shapes is None:
            shapes = _broadcast(func, results, [*tensors_of((args, kwargs))])
        if shapes is None or len(shapes) != len(results):
            return
        for x, shape in zip(results, shapes, strict=True):
            if x.ndim == len(shape):
                set_whole_shape(x, shape)

    def shapes(
        self, func: Callable[..., Any], args: tuple, kwargs: dict, whole: bool = True
    ) -> Shapes | None:
        """Of the tensors that a function gives, with all positions or with those here; None where
        that needs what they hold."""
        key = func, whole, _key(args), _key(kwargs)
        try:
            known = key in self._found
        except TypeError:  # an argument has no hash
            return _run(func, args, kwargs, whole)
        if not known:
            if len(self._found) == MOST:
                self._found.clear()
            self._found[key] = _run(func, args, kwargs, whole)
        return self._found[key]


def _run(func: Callable[..., Any], args: tuple, kwargs: dict, whole: bool) -> Shapes | None:
    bare, named = _without_elements(args, whole), _without_elements(kwargs, whole)
    if named.get("device") is not None or not any(True for _ in tensors_of((bare, named))):
        named["device"] = "meta"  # else it would take memory, or draw numbers
    with without_function_modes(), torch.no_grad():
        try:
            made = func(*bare, **named)
        except Exception:  # whatever a function raises of tensors without elements
            return None
    return [tuple(x.shape) for x in tensors_of(made)]


def _without_elements(value: Any, whole: bool) -> Any:
    if isinstance(value, Tensor):
        shape = whole_shape(value) if whole else tuple(value.shape)
        strides = value.stride() if is_plain(value) else ()
        order = sorted(range(value.ndim), key=lambda d: -strides[d]) if strides else ()
        if len(order) == len(shape) and order:
            return torch.empty_permuted(shape, order, dtype=value.dtype, device="meta")
        return torch.empty(shape, dtype=value.dtype, device="meta")
    if isinstance(value, torch.Size | tuple | list):
        return type(value)([_without_elements(x, whole) for x in value])
    if isinstance(value, dict):
        return {key: _without_elements(x, whole) for key, x in value.items()}
    if isinstance(value, slice):
        each = (value.start, value.stop, value.step)
        return slice(*(_without_elements(x, whole) for x in each))
    return whole_number(value) if whole else value


def _key(value: Any) -> Any:
    """What shapes follow from."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), whole_shape(value), value.stride()
    if isinstance(value, tuple | list):
        return type(value), *map(_key, value)
    if isinstance(value, dict):
        return tuple((key, _key(x)) for key, x in value.items())
    if isinstance(value, slice):
        return slice, _key(value.start), _key(value.stop), _key(value.step)
    if isinstance(value, PositionCount):
        return PositionCount, int(value), value.whole
    return type(value), value


def _broadcast(
    func: Callable[..., Any], results: list[Tensor], given: Iterable[Tensor]
) -> Shapes | None:
    name = getattr(func, "__name__", "").strip("_")
    if not ({name, name[1:]} & _ELEMENTWISE):  # also those in place and from the right
        return None
    (made,) = results if len(results) == 1 else (None,)
    if made is None:
        return None
    shape = list(made.shape)
    for x in given:
        for back, (here, whole) in enumerate(zip(x.shape[::-1], whole_shape(x)[::-1], strict=True)):
            if here != whole and back < made.ndim and made.shape[-1 - back] == here:
                shape[-1 - back] = whole
    return [tuple(shape)]
