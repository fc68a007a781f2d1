"""Functions of torch that give a position what they give it beside all others: of a part of the
positions they make the part of what they make of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .position_counts import PositionCount
from .whole_marks import dims_of_positions, tensors_of

# arithmetic, in which a count is a number and no size
ARITHMETIC = {
    *("add", "sub", "rsub", "mul", "div", "truediv", "rtruediv", "true_divide", "floordiv", "pow"),
    *("rpow", "floor_divide", "mod", "remainder", "fmod", "clamp", "clamp_min", "clamp_max"),
    *("eq", "ne", "lt", "le", "gt", "ge", "radd", "rmul", "divide", "multiply", "subtract"),
    *("where", "masked_fill", "fill", "index_fill", "and", "or", "xor"),
}
_OF_EACH_ELEMENT = ARITHMETIC | {
    *("neg", "abs", "exp", "log", "sin", "cos", "sqrt", "rsqrt", "reciprocal", "invert"),
    *("logical_not", "logical_and", "logical_or", "to", "type"),
    *("type_as", "float", "double", "half", "bfloat16", "long", "int", "bool", "clone", "detach"),
    *("contiguous", "expand", "expand_as", "unsqueeze", "transpose", "permute", "zeros_like"),
    *("ones_like", "cpu", "cuda"),
}
_PRODUCTS = {"matmul", "bmm", "rmatmul"}


def by_position(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a function is known to be one."""
    name = getattr(func, "__name__", "").strip("_")
    if name in _OF_EACH_ELEMENT:
        return True
    if name == "getitem":
        return isinstance(args[0], Tensor) and _takes_all_positions(args[0], args[1])
    if name in _PRODUCTS and len(args) == 2:
        left, right = args[::-1] if name == "rmatmul" else args
        summed = left.ndim - 1 in dims_of_positions(left) or max(
            right.ndim - 2, 0
        ) in dims_of_positions(right)
        return not summed
    if func is torch.cat:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        parts = [*tensors_of(args[:1])]
        return bool(parts) and all(dim % x.ndim not in dims_of_positions(x) for x in parts)
    return False


def _takes_all_positions(x: Tensor, index: Any) -> bool:
    """Whether an index of slices leaves the dims of positions as they are, and may add dims."""
    each = index if isinstance(index, tuple) else (index,)
    if not all(i is None or i is Ellipsis or _is_fixed_slice(i) for i in each):
        return False
    taken = _by_dim(x, each)
    return all(taken.get(dim, slice(None)) == slice(None) for dim in dims_of_positions(x))


def numbers_positions(x: Tensor, index: Any) -> bool:
    """Whether an index has a number in a dim of positions, or a slice between numbers."""
    each = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, Tensor | list) for i in each):
        return False
    taken = _by_dim(x, each)
    return any(_is_number(taken.get(dim)) for dim in dims_of_positions(x))


def _by_dim(x: Tensor, index: Iterable[Any]) -> dict[int, Any]:
    """What an index without tensors takes of each dim."""
    taken = [i for i in index if i is not None]
    before = taken.index(Ellipsis) if Ellipsis in taken else len(taken)
    after = taken[before + 1 :]
    return dict(enumerate(taken[:before])) | dict(enumerate(after, x.ndim - len(after)))


def _is_number(index: Any) -> bool:
    if isinstance(index, slice):
        return any(bound and _is_number(bound) for bound in (index.start, index.stop))
    return isinstance(index, int) and not isinstance(index, PositionCount)


def _is_fixed_slice(index: Any) -> bool:
    """Whether it is a slice whose bounds count no positions."""
    if not isinstance(index, slice):
        return False
    return not any(isinstance(x, PositionCount) for x in (index.start, index.stop, index.step))
