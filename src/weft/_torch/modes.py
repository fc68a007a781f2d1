"""Modes: which function and dispatch modes are active. `torch.overrides` and
`torch.utils._python_dispatch` have no public way to list them."""

from __future__ import annotations

from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack


def function_modes() -> list[TorchFunctionMode]:
    """The active modes around functions, the outermost first."""
    return _get_current_function_mode_stack()


def dispatch_modes() -> list[TorchDispatchMode]:
    """The active modes around operators, the outermost first."""
    return _get_current_dispatch_mode_stack()
