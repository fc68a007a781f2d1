"""What one forward reads and writes of its model's weights and buffers. Found by a run on tensors
without elements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from weft._torch.autograd import around_functions
from weft._torch.modes import TorchDispatchMode
from weft._torch.tensors import fake_mode
from weft.nn import module_calls
from weft.pipeline import tensors_read

from .direct_forward import call_forwards_with_hooks
from .plan_request import PlanRequest
from .without_elements import copy_without_elements, without_elements


@dataclass(frozen=True)
class Read:
    """A function reads a weight.

    Args:
        weight: its names, the first that of `named_parameters`.
        inside: the modules that run then, the innermost last.
        function: the outermost autograd function of the model that runs then; "" if none does.
        outside: how many of the modules ran before it.
    """

    weight: tuple[str, ...]
    inside: tuple[str, ...]
    function: str
    outside: int | None


class ForwardRecord:
    """A forward of a request's model on its sample, as far as it runs without elements. `ended`: to
    its end. `asks_gradients`: whether it calls `torch.autograd.grad`, or `backward`.

    Args:
        request: has a sample.
    """

    def __init__(self, request: PlanRequest):
        self.request = request
        mode = fake_mode()
        self._model = model = copy_without_elements(request.model, mode)
        call_forwards_with_hooks(model)  # as the model that is laid out does
        self._before, self._writes = dict(_buffers(model)), _Writes()
        reads, self.ended = _Reads(model), False
        try:
            with ExitStack() as stack:
                reads.inside = stack.enter_context(module_calls(model))
                stack.enter_context(around_functions(reads.begin, reads.end))
                stack.enter_context(without_elements(mode))
                stack.enter_context(self._writes)
                stack.enter_context(reads)
                model(**request.arguments())
            self.ended = True
        except Exception:  # the rest of it is not seen: a trial and the first step look again
            pass
        self.reads = tuple(reads.found)  # in order, each once
        self.asks_gradients = reads.asks_gradients
        self._functions = reads.functions

    @cached_property
    def loops_over_samples(self) -> bool:
        """Whether it calls more functions for twice the samples, or may do so: one of the two runs
        does not end."""
        if not self.ended:
            return True
        twice = ForwardRecord(self.request.with_twice_the_samples())
        return not twice.ended or twice._functions != self._functions

    def changed_weights(self) -> tuple[str, ...]:
        """Names of the weights that it changes in place: of what ranks have gathered of a weight
        nothing is kept."""
        parameters = self._model.named_parameters()
        return tuple(n for n, p in parameters if _storage(p) in self._writes.storages)

    def changes_state(self) -> bool:
        """Whether it changes a weight in place, or a buffer in place or for another tensor: ranks
        with other samples may change it to other values. Statistics of batch norms are left out."""
        buffers = dict(_buffers(self._model))
        assigned = any(tensor is not self._before.get(name) for name, tensor in buffers.items())
        state = (*self._model.parameters(), *buffers.values())
        return assigned or any(_storage(t) in self._writes.storages for t in state)


def record_forward(request: PlanRequest) -> ForwardRecord | None:
    """The forward of a request, which those that are made of it for other layouts share; None
    without a sample."""
    if request.sample is None:
        return None
    for known in request.records:
        asked = known.request
        same = asked.model is request.model and asked.sample is request.sample
        if same and asked.inputs == request.inputs:
            return known
    request.records.append(ForwardRecord(request))
    return request.records[-1]


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


_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


class _Reads(TorchFunctionMode):
    """Which weights are read where."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self._names: dict[int, tuple[str, ...]] = {}  # of each weight, by id
        for name, p in model.named_parameters(remove_duplicate=False):
            self._names[id(p)] = *self._names.get(id(p), ()), name
        self.inside: list[str] = []
        self.found: dict[Read, None] = {}
        self.functions = 0  # of torch that have run
        self.asks_gradients = False
        self._functions: list[tuple[str, int]] = []  # that run: name, how many modules ran before

    def begin(self, function: str) -> None:
        """An autograd function begins its forward."""
        self._functions.append((function, len(self.inside)))

    def end(self) -> None:
        """The innermost one ends it."""
        self._functions.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.functions += 1
        self.asks_gradients |= func in _GRADIENTS
        for tensor in tensors_read(func, args, kwargs or {}):
            names = self._names.get(id(tensor))
            if names is not None:
                function, outside = self._functions[0] if self._functions else ("", None)
                self.found[Read(names, tuple(self.inside), function, outside)] = None
        return func(*args, **(kwargs or {}))
