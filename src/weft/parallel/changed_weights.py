"""Weights and buffers that a forward changes, as by a mask that is multiplied into them. Of what
ranks have gathered of a weight nothing is kept, and ranks with other samples change buffers to
other values. Found by a run on tensors without elements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft._torch.modes import TorchDispatchMode
from weft._torch.tensors import fake_mode

from .plan_request import PlanRequest
from .without_elements import copy_without_elements, without_elements


def changed_weights(request: PlanRequest) -> tuple[str, ...]:
    """Names of the weights that the forward changes in place, as far as it runs without elements;
    nothing without a sample."""
    if request.sample is None:
        return ()
    model, writes, _ = _after_a_forward(request)
    return tuple(n for n, p in model.named_parameters() if _storage(p) in writes.storages)


def changes_state(request: PlanRequest) -> bool:
    """Whether the forward changes a weight in place, or a buffer in place or for another tensor, as
    far as it runs without elements: ranks with other samples may change it to other values.
    Statistics of batch norms are left out; False without a sample."""
    if request.sample is None:
        return False
    model, writes, before = _after_a_forward(request)
    buffers = dict(_buffers(model))
    assigned = any(tensor is not before.get(name) for name, tensor in buffers.items())
    state = (*model.parameters(), *buffers.values())
    return assigned or any(_storage(t) in writes.storages for t in state)


def _after_a_forward(request: PlanRequest) -> tuple[nn.Module, _Writes, dict[str, Tensor]]:
    """A copy of the model after a forward without elements, what that wrote into, and the buffers
    that the copy had before."""
    mode = fake_mode()
    model = copy_without_elements(request.model, mode)
    before, writes = dict(_buffers(model)), _Writes()
    try:
        with without_elements(mode), writes:
            model(**request.arguments())
    except Exception:  # the rest of it is not seen; the first step looks at the elements
        pass
    return model, writes, before


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            for name, tensor in module.named_buffers(recurse=False):
                yield f"{prefix}.{name}", tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Writes(TorchDispatchMode):
    """The storages that operators have written into."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given, declared in zip(args, func._schema.arguments, strict=False):
            written = declared.alias_info is not None and declared.alias_info.is_write
            if written and isinstance(given, Tensor):
                self.storages.add(_storage(given))
        return func(*args, **(kwargs or {}))
