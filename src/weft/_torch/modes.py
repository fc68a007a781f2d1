"""Modes: which function and dispatch modes are active. `torch.overrides` and
`torch.utils._python_dispatch` have no public way to list them."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)


def function_modes() -> list[TorchFunctionMode]:
    """The active modes around functions, the outermost first."""
    return _get_current_function_mode_stack()


def without_function_modes() -> AbstractContextManager[None]:
    """Inside this context functions go past every `__torch_function__`, of modes and subclasses.

    Torch has no public name for it.
    """
    return torch._C.DisableTorchFunction()


def dispatch_modes() -> list[TorchDispatchMode]:
    """The active modes around operators, the outermost first."""
    return _get_current_dispatch_mode_stack()


def without_dispatch_modes() -> AbstractContextManager[None]:
    """Inside this context operators go past every `__torch_dispatch__`, of modes and subclasses.

    Torch has no public name for it.
    """
    return no_dispatch()
