"""Whether a model calls other operators on long sequences than on short ones, as in
`if x.shape[1] > 512`: then short ones do not show what it computes on long ones. Found by runs on
tensors without elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from weft._torch.modes import TorchDispatchMode
from weft._torch.tensors import fake_mode
from weft.nn import model_arguments

from .without_elements import copy_without_elements, without_elements


def same_operators(
    model: nn.Module,
    inputs: Sequence[str],
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
) -> bool:
    """Whether a forward calls the same operators on two batches, in the same order, as far as it
    runs without elements.

    Args:
        model: the whole model; it may be on the meta device.
        inputs: the entries of a batch that it is called with.
        first: a batch on the CPU.
        second: a batch on the CPU, of sequences of another length.
    """
    return _operators(model, inputs, first) == _operators(model, inputs, second)


def _operators(model: nn.Module, inputs: Sequence[str], batch: Mapping[str, Tensor]) -> list[Any]:
    mode, called = fake_mode(), _Called()
    copy = copy_without_elements(model, mode)
    try:
        with without_elements(mode), called:
            copy(**model_arguments(inputs, dict(batch)))
    except Exception:  # the rest of it is not seen
        pass
    return called.operators


class _Called(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))
