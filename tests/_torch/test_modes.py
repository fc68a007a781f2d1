"""What torch must keep doing for weft._torch.modes."""

from __future__ import annotations

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from weft._torch.modes import dispatch_modes, function_modes


class Functions(TorchFunctionMode): ...


class Operators(TorchDispatchMode): ...


def test_active_modes_are_listed_the_outermost_first() -> None:
    assert function_modes() == [] and dispatch_modes() == []
    with Functions() as one, Functions() as two, Operators() as three:
        assert function_modes() == [one, two]
        assert dispatch_modes() == [three]
    assert function_modes() == [] and dispatch_modes() == []
