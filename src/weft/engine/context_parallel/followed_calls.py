"""What a call of a function of torch is given where positions are followed, and what it does with
it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .position_counts import PositionCount, count, whole_number
from .whole_marks import is_fixed, is_marked, whole_of, whole_shape

SIZES = {Tensor.size, Tensor.numel, Tensor.nelement, torch.numel}
_DUNDERS_IN_PLACE = {
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__"),
    *("__iand__", "__ior__", "__ixor__", "__ipow__", "__imod__"),
}


def with_counts(
    func: Callable[..., Any], found: Any, args: tuple, kwargs: dict, used: Callable[[], None]
) -> Any:
    """Sizes of a tensor, those that count positions as such."""
    x = args[0] if args else kwargs["self"]
    if not is_marked(x):
        return found
    shape = whole_shape(x)
    if isinstance(found, torch.Size):
        return counted_shape(x, used)
    if func is Tensor.size:
        dim = kwargs.get("dim", *args[1:])
        return count(found, shape[dim], used)
    if func in SIZES:
        return count(found, torch.Size(shape).numel(), used)
    return found


def counted_shape(x: Tensor, used: Callable[[], None]) -> torch.Size:
    return torch.Size(count(*each, used) for each in zip(x.shape, whole_shape(x), strict=True))


def are_fixed(tensors: Iterable[Tensor]) -> bool:
    """Whether there are any, and all are weights or known to be of no position."""
    given = [*tensors]
    return bool(given) and all(is_fixed(x) or isinstance(x, nn.Parameter) for x in given)


def whole_argument(x: Any) -> Any:
    """What an argument of a function is with all positions."""
    found = whole_of(x)
    return whole_number(x) if found is None else found.tensor


def wholes(arguments: Any) -> Any:
    """Arguments of a function for all positions."""
    return map_arguments(arguments, whole_argument)


def changes_first(func: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument."""
    name = getattr(func, "__name__", "")
    return name in _DUNDERS_IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def has_effects(func: Callable[..., Any]) -> bool:
    """Whether a function is none of torch's on tensors, but a collective, or an operator of whoever
    registered it."""
    module = getattr(func, "__module__", None) or ""
    return module.startswith(("torch.distributed", "torch._ops", "weft."))


def stands_for_a_mask(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_meta and hasattr(x, "weft_pattern")


def counts_positions(values: Any) -> bool:
    """Whether an integer among them counts positions."""
    if isinstance(values, tuple | list):
        return any(map(counts_positions, values))
    if isinstance(values, dict):
        return any(map(counts_positions, values.values()))
    if isinstance(values, slice):
        return any(map(counts_positions, (values.start, values.stop, values.step)))
    return isinstance(values, PositionCount)


def map_arguments(values: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(values, tuple | list):
        return type(values)([map_arguments(value, change) for value in values])
    if isinstance(values, dict):
        return {key: map_arguments(value, change) for key, value in values.items()}
    if isinstance(values, slice):
        return slice(*(change(x) for x in (values.start, values.stop, values.step)))
    return change(values)
