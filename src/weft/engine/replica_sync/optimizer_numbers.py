"""The dtype of numbers that an optimizer keeps, such as counts of steps and products of momenta.
torch makes them in its default dtype, which is the whole process's: where an optimizer steps in a
thread, the thread that trains may just have another one, and rounding would follow from that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

MAKE = torch.tensor, torch.as_tensor, torch.zeros, torch.ones


class NumbersIn(TorchFunctionMode):
    """Floating-point tensors without dims are made in `dtype`."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func in MAKE and made.ndim == 0 and made.is_floating_point():
            return func(*args, **{**kwargs, "dtype": self._dtype})
        return made
