"""Copies of a model with other tensors, and ops on tensors without elements."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from weft._torch.tensors import (
    FakeTensor,
)
from weft.core import UnsupportedModel

from .functions import GROUPED_MM


def copy_with_tensors(model: nn.Module, replace: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a model in which `replace` has replaced every parameter and buffer. Raises
    UnsupportedModel."""
    memo = {id(t): replace(t) for t in (*model.parameters(), *model.buffers())}
    try:
        return copy.deepcopy(model, memo)  # type: ignore[arg-type]
    except (TypeError, RuntimeError) as problem:
        raise UnsupportedModel(
            "model",
            type(model).__name__,
            f"it cannot be copied ({problem})",
            "keep such attributes out of the model",
        ) from problem


def run_op_without_data(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The result of an op. Torch cannot compute the shape of a grouped matmul without data unless
    it is in bf16; this function can."""
    first, second = args[:2] if func._overloadpacket is GROUPED_MM else (None, None)
    if isinstance(first, FakeTensor) and isinstance(second, FakeTensor):
        if first.ndim == 2 and second.ndim == 3:
            return first.new_empty((first.shape[0], second.shape[2]))
        if first.ndim == second.ndim == 2:
            offsets = args[2] if len(args) > 2 else kwargs["offs"]
            return first.new_empty((len(offsets), first.shape[0], second.shape[1]))
    return func(*args, **kwargs)


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter; also true of placeholders for one."""
    return isinstance(tensor, nn.Parameter)
