"""Which modules of a model live on which named worker. Nothing is moved here.

[workers]
storage = ["embedding"]
big     = ["blocks.*"]      # the top-most modules that match, each with all that is inside
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from .errors import ConfigError, nearest
from .module_names import is_inside

# the process that has the data, the loss, and every module that no worker is named for
DRIVER = "driver"
NAME = re.compile(r"[A-Za-z0-9_:-]{1,127}")  # what torch.distributed.rpc takes


@dataclass(frozen=True)
class WorkerPlacement:
    """`workers` by rank, from 1; rank 0 is the driver. `modules`: each placed module and its
    worker."""

    workers: tuple[str, ...]
    modules: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all processes, by rank."""
        return (DRIVER, *self.workers)

    def of(self, name: str) -> str:
        """Where a module, parameter or buffer lives."""
        return next(
            (worker for module, worker in self.modules.items() if is_inside(name, module)), DRIVER
        )

    def __str__(self) -> str:
        held = (
            (worker, [m for m, at in self.modules.items() if at == worker])
            for worker in self.workers
        )
        return "; ".join(f"{worker} holds {', '.join(modules)}" for worker, modules in held)


def place_modules(model: nn.Module, workers: Mapping[str, Sequence[str]]) -> WorkerPlacement:
    """Assign the modules of a model to workers. `workers` maps a worker to globs of module names;
    the model may be on the meta device. Raises ConfigError."""
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    found: dict[str, str] = {}
    for worker, patterns in workers.items():
        _check_name(worker)
        matches: set[str] = set()
        for pattern in patterns:
            matching = fnmatch.filter(modules, pattern)
            if not matching:
                fix = nearest(pattern, modules)
                raise ConfigError(f"workers.{worker}", pattern, "no module has such a name", fix)
            matches |= set(matching)
        if not matches:
            raise ConfigError(
                f"workers.{worker}", list(patterns), "names no module", "name one, or leave it out"
            )
        for name in modules:
            if name in matches and not any(is_inside(name, other) for other in matches - {name}):
                _check_callable(worker, name, modules[name])
                _check_overlap(worker, name, found)
                found[name] = worker
    places = WorkerPlacement(tuple(workers), found)
    _check_tied(model, places)
    return places


def _check_name(worker: str) -> None:
    if worker == DRIVER:
        problem = "is the name of the process that runs the model's own forward"
        raise ConfigError(
            "workers",
            worker,
            problem,
            "leave it out: the driver holds every module that no worker holds",
        )
    if not NAME.fullmatch(worker):
        problem = "is not a name that torch.distributed.rpc accepts"
        raise ConfigError(
            "workers", worker, problem, "use up to 127 letters, digits and any of _ - :"
        )


def _check_callable(worker: str, name: str, module: nn.Module) -> None:
    if type(module).forward is nn.Module.forward:  # a ModuleList, as a rule
        problem = f"is a {type(module).__name__}, whose own forward is never called"
        raise ConfigError(f"workers.{worker}", name, problem, f'write "{name}.*"')


def _check_overlap(worker: str, name: str, found: Mapping[str, str]) -> None:
    """Refuse a module that another worker has, in whole or in part."""
    for other, at in found.items():
        if is_inside(name, other) or is_inside(other, name):
            problem = (
                f"is on worker {at} too"
                if name == other
                else f"and {other}, on worker {at}, are one inside the other"
            )
            raise ConfigError(
                f"workers.{worker}",
                name,
                problem,
                "name each module, with all inside, for one worker",
            )


def _check_tied(model: nn.Module, places: WorkerPlacement) -> None:
    """Refuse a tensor that would live in two places, and be trained in each by itself."""
    kept = model.state_dict(keep_vars=True)
    buffers = (
        (name, tensor)
        for name, tensor in model.named_buffers(remove_duplicate=False)
        if name in kept
    )
    for names in _tied_names([*model.named_parameters(remove_duplicate=False), *buffers]):
        at = {places.of(name): name for name in names}
        if len(at) > 1:
            (one, first), (other, second), *_ = at.items()
            worker, name = (one, first) if one != DRIVER else (other, second)
            where = f"{first} on {one} and {second} on {other}"
            fix = "place the modules that share it on one worker, none of them, or untie them"
            raise ConfigError(
                f"workers.{worker}", name, f"is one tensor with two names: {where}", fix
            )


def _tied_names(named: Iterable[tuple[str, object]]) -> list[list[str]]:
    """The names of each tensor."""
    names: dict[int, list[str]] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())
