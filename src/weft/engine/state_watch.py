"""What a forward changes in place, weights and buffers, and whether all ranks with other samples
changed it alike: as one device would have one copy of it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from weft._torch.tensors import version_of
from weft.core import Plan, UnsupportedModel, either
from weft.nn import BatchNorm, GateBias
from weft.parallel import TOKEN_AXES, Mesh
from weft.pipeline import PlaceholderTensor

from .fsdp_units import FSDPUnits

_OUTSIDE = "change it outside of the forward, or leave fsdp out of the layout"
_MAKE = "make it in __init__, or run the model once in the function that builds it"

# an average of weights that begins as their copy changes nothing before the first update
WATCHED = 2

State = tuple[int, ...]  # torch's count of changes in place, and sums of the elements


class StateWatch:
    """Over the forwards of a step. What the first two steps do not change is not looked at again.

    Args:
        model: after it is sharded. Batch norms, whose statistics the plan synchronises, and the
            biases of gates are left out.
        plan: this rank's part.
        mesh: the process groups.
        units: what FSDP2 gathers.
    """

    def __init__(self, model: nn.Module, plan: Plan, mesh: Mesh, units: FSDPUnits):
        self._model, self._plan = model, plan
        self.index, self.size = mesh.index(*TOKEN_AXES), mesh.size(*TOKEN_AXES)
        self._before: dict[str, tuple[Tensor, Tensor | State]] = {}
        self._left = WATCHED  # steps that are looked at
        self._changed: dict[str, None] = {}
        self._names: set[str] = set()
        self._modules: dict[int, nn.Module] = {}
        self._handles = []
        for unit in units:
            module: Any = unit.module
            self._handles += [
                module.register_forward_pre_hook(partial(self._enter, unit.name)),
                module.register_forward_hook(partial(self._leave, unit.name), prepend=True),
            ]
        self._gathered: dict[str, list[tuple[str, Tensor, State]]] = {}

    @property
    def watches(self) -> bool:
        """Whether ranks have to compare buffers at the end of a step."""
        return self.size > 1 and any(True for _ in _buffers(self._model))

    def begin(self) -> None:
        """A step begins; its buffers are the first rank's."""
        if not self._left:
            return
        self._names = {name for name, _ in self._model.named_parameters()}
        self._modules = {id(module): module for module in self._model.modules()}
        self._before = {n: (t, t.detach().clone()) for n, t in _buffers(self._model)}
        for name, p in self._model.named_parameters():
            if not isinstance(p, (DTensor, PlaceholderTensor)):
                self._before[name] = p, _state_of(p)

    def digest(self) -> int:
        """40 bits of what forwards have been seen to change; 0 if nothing. Raises UnsupportedModel
        for parameters that they made."""
        if self._left:
            self._left -= 1
            self.refuse_new()
            self._changed |= dict.fromkeys(self._find(self._before))
            self._before = {}
        if not self._left:
            self._modules = {}
            while self._handles:
                self._handles.pop().remove()
        if self.size == 1 or not self._changed:
            return 0
        found = 1
        for name, tensor in self._named():
            if name in self._changed:
                data = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                raw = data.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                found = (found * 1000003 + zlib.crc32(raw.numpy().tobytes())) % 2**40
        return found

    def error(self) -> UnsupportedModel:
        """That the digests of ranks differ."""
        names = [*self._changed]
        others = f", as {len(names) - 1} others are" if len(names) > 1 else ""
        fixes = ["change it outside of the forward", "keep statistics in nn.BatchNorm"]
        if self._plan.of_one_state:
            fixes.append(f"use a layout of {either(self._plan.of_one_state)} alone")
        return UnsupportedModel(
            "layout",
            str(self._plan.layout),
            f"{names[0] if names else 'its state'} is changed by the model's forward{others}, and"
            " ranks have different samples, so they change it to different values",
            either(fixes),
        )

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        yield from _buffers(self._model)
        yield from self._model.named_parameters()

    def _find(self, before: dict[str, tuple[Tensor, Tensor | State]]) -> Iterator[str]:
        for name, now in self._named():
            if name in before:
                tensor, was = before[name]
                same = (
                    _state_of(now) == was
                    if isinstance(was, tuple)
                    else now.shape == was.shape and torch.equal(now.detach(), was)
                )
                if tensor is not now or not same:
                    yield name

    def refuse_new(self) -> None:
        """Refuse what the forwards of the first step have made. Raises UnsupportedModel."""
        new = [n for n, _ in self._model.named_parameters() if n not in self._names]
        if new:
            raise UnsupportedModel(
                "model",
                new[0],
                "is made by the first forward: no optimizer would train it, and no checkpoint"
                " would have it",
                _MAKE,
            )
        for name, module in self._model.named_modules():
            if id(module) not in self._modules and any(True for _ in module.parameters()):
                raise UnsupportedModel(
                    "model",
                    name,
                    "is made by the first forward, after weft has placed the model's tensors",
                    _MAKE,
                )

    @torch.compiler.disable  # what its user compiled has it inside; versions would be guarded
    def _enter(self, unit: str, module: nn.Module, *_: Any) -> None:
        absent = (DTensor, PlaceholderTensor)
        gathered = [(n, p) for n, p in module.named_parameters() if not isinstance(p, absent)]
        self._gathered[unit] = [(n, p, _state_of(p)) for n, p in gathered]

    @torch.compiler.disable
    def _leave(self, unit: str, *_: Any) -> None:
        for name, p, state in self._gathered.pop(unit, ()):
            if _state_of(p) != state:
                raise UnsupportedModel(
                    "layout",
                    str(self._plan.layout),
                    f"{f'{unit}.{name}' if unit else name} is changed by the model's forward, and"
                    " fsdp drops changes to gathered weights",
                    _OUTSIDE,
                )


def _state_of(p: Tensor) -> State:
    """What a change in place changes: torch's count of them, or, through `.data`, the elements."""
    values = torch.view_as_real(p.detach()) if p.is_complex() else p.detach()
    if values.is_meta or not (values.numel() and values.is_floating_point()):
        return (version_of(p),)
    sums = values.sum(dtype=torch.float64), torch.linalg.vector_norm(values, dtype=torch.float64)
    return (version_of(p), *torch.stack(sums).view(torch.int64).tolist())  # bits: nan is nan


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        if not isinstance(module, (_BatchNorm, BatchNorm, GateBias)):
            for leaf, buffer in module.named_buffers(recurse=False):
                if not isinstance(buffer, PlaceholderTensor):
                    yield f"{prefix}.{leaf}" if prefix else leaf, buffer
