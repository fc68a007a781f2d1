"""What torch must keep doing for weft._torch.modes."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from weft._torch.modes import (
    dispatch_modes,
    function_modes,
    without_dispatch_modes,
    without_function_modes,
)


class Functions(TorchFunctionMode): ...


class Operators(TorchDispatchMode): ...


def test_active_modes_are_listed_the_outermost_first() -> None:
    assert function_modes() == [] and dispatch_modes() == []
    with Functions() as one, Functions() as two, Operators() as three:
        assert function_modes() == [one, two]
        assert dispatch_modes() == [three]
    assert function_modes() == [] and dispatch_modes() == []


class Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError(func)


def test_operators_go_past_dispatch_modes() -> None:
    with Refusing(), without_dispatch_modes():
        assert torch.ones(2).sum().item() == 2


class NoFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError(func)


def test_functions_go_past_function_modes() -> None:
    with NoFunctions(), without_function_modes():
        assert torch.ones(2).sum().item() == 2
