"""Checks that all ranks ran the same modules in the same order, on which FSDP2's collectives
depend."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft._torch.compiler import before_compiled_call, compiled_by_user
from weft.core import UnsupportedModel, is_inside
from weft.parallel import Mesh


class ModuleTrail:
    """A hash of the modules with parameters that ran since `clear`, in order. Inside of what FSDP2
    gathers together a module counts once, however often data say to call it, as a module that each
    chosen expert calls: its weights are there, and their gradients are reduced, once. 20 bits: the
    square of the hash is exact in float64, and a sum of both over ranks tells whether all are
    equal.

    Args:
        model: whose modules are watched.
        units: names of modules that FSDP2 gathers when they are called; without any, nothing is
            watched.
        compiled: names of modules that a compiler follows, which are watched as a whole: in a
            graph, what runs does not depend on data. So are modules that their user compiled.
        chosen: names of modules that run only where data say so, whatever FSDP2 does.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Collection[str],
        compiled: Collection[str] = (),
        chosen: Collection[str] = (),
    ):
        self.hash = 0
        wholes = {model.get_submodule(name) for name in compiled}
        by_user = {m for m in model.modules() if compiled_by_user(m)}
        inside = {m for whole in wholes | by_user for m in [*whole.modules()][1:]}
        inside |= {m for name in chosen for m in _modules_of(model, name)}
        self._ran: dict[str, set[int]] = {unit: set() for unit in units}
        for index, (name, module) in enumerate(model.named_modules() if units else ()):
            if module in inside:
                continue
            holders = (unit for unit in units if is_inside(name, unit))
            note = partial(self._pass, index, max(holders, key=len, default=""), name in units)
            if module in by_user:
                before_compiled_call(module, note)
            elif name in units or module in wholes or module._parameters:
                module.register_forward_pre_hook(note)

    def clear(self) -> None:
        self.hash = 0
        for ran in self._ran.values():
            ran.clear()

    def _pass(self, index: int, unit: str, gathers: bool, *_: Any) -> None:
        ran = self._ran.setdefault(unit, set())
        if gathers:
            ran.clear()
        if index not in ran:
            ran.add(index)
            self.hash = (self.hash * 1000003 + index) % 2**20

    def check_over(
        self, mesh: Mesh, axes: tuple[str, ...], size: int, error: UnsupportedModel
    ) -> None:
        """Raise `error` unless all `size` ranks of these axes have the same hash."""
        seen = torch.tensor([self.hash, self.hash**2], dtype=torch.float64, device=mesh.device)
        dist.all_reduce(seen, group=mesh.group(*axes))
        if seen[1] * size != seen[0] ** 2:
            raise error


def _modules_of(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """Of a module that may be another stage's."""
    with suppress(AttributeError):
        yield from model.get_submodule(name).modules()


def zero_if_equal(value: int, index: int, size: int) -> int:
    """What this rank adds to a sum over ranks that is zero if all `size` have the same value, below
    2**40: exact in float64 for up to 4096 ranks."""
    return value * (1 - size) if index == 0 else value


def diverged_error(layout: object, step: int) -> UnsupportedModel:
    """The error for ranks that ran different modules."""
    return UnsupportedModel(
        "layout",
        str(layout),
        f"in step {step} ranks ran different modules, or ran them in different orders",
        "use dp: FSDP2 gathers and reduces what runs, and it must be the same on every rank",
    )
