"""What is left out of a trial, so that the whole model and the sharded one compute with the same:
random numbers, dropout, and what gates ask of the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from weft.nn import DRAWS, DROPOUTS, Draws, with_loss, within_capacity

from .function_overrides import OPENED_FUNCTIONS
from .trial_branches import BranchReads

ALIKE = 1000  # draws of a forward that give 0.5; one that waits for another number then gets it
_STEP = 0.6180339887498949  # golden ratio less 1: its multiples are spread over [0, 1)


class TrialFunctions(TorchFunctionMode):
    """The innermost mode around a forward: it sees calls first. Dropout drops nothing, gates add no
    loss, and experts have room for all. `training`: torch's functions that draw are made of 0.5,
    the middle of a uniform distribution. In evaluation mode, where few models draw, they draw.
    `reads`: what the forward reads of tensors as true or false."""

    def __init__(self, training: bool, reads: BranchReads | None = None) -> None:
        super().__init__()
        self._training, self._draws, self._reads = training, count(), reads or BranchReads(None)

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in (with_loss, within_capacity):
            return args[0]
        if func is F.scaled_dot_product_attention:
            args, kwargs = (*args[:4], *((0.0,) if len(args) > 4 else ()), *args[5:]), dict(kwargs)
            kwargs.pop("dropout_p", None)
        if func in OPENED_FUNCTIONS and self._training:
            with self:
                return OPENED_FUNCTIONS[func](*args, **kwargs)
        if func in DRAWS and self._training:
            return DRAWS[func](Draws(self._uniform), *args, **kwargs)
        if self._reads.sees(func, args):
            return self._reads(func, args, kwargs)
        return func(*args, **kwargs)

    def _uniform(self, shape: torch.Size, device: torch.device, alike: bool) -> Tensor:
        further = max(0, next(self._draws) - ALIKE)
        return torch.full(shape, (0.5 + further * _STEP) % 1, dtype=torch.float64, device=device)
