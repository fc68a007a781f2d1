"""Schedules: one file each. The folder is the registry.

A file has `NAME` and `build(ranks, microbatches, **options) -> Schedule`. It may also have

- `summarize(...) -> ScheduleSummary`: bubble and memory in closed form, for the planner;
- `min_microbatches(ranks)`: the fewest microbatches at which the bubble is what `build` states
  (default: `ranks`);
- `microbatch_multiple(ranks)`: a divisor of the number of microbatches at which it is so
  (default: 1);
- `SEARCHED = False`: the planner does not propose the schedule by itself;
- `NEEDS_COSTS = True`: the order of actions depends on measured costs.

Users add their own schedule with `register`, or name it in a run file as
`package.module:function`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from weft.core import DEFAULT_SCHEDULE, ConfigError, Schedule, nearest

from ..validate import find_faults
from . import one_f_one_b
from ._parts import Array, ScheduleSummary

Builder = Callable[..., Schedule]

_registered: dict[str, Builder] = {}


def registry() -> Mapping[str, Builder]:
    """Name -> the function that makes the schedule; those of the folder, then registered ones."""
    return {**builtin_schedules(), **_registered}


def register(build: Builder, name: str | None = None) -> Builder:
    """Add a schedule of your own, `build(ranks, microbatches, **options) -> Schedule`, under a name
    (default: the function's).

    Returns `build`, so it also works as a decorator. Raises ConfigError if weft has a schedule of
    this name.
    """
    name = name or build.__name__
    if name in builtin_schedules():
        raise ConfigError(
            "pipeline.schedule", name, "weft has a schedule of this name", "choose another name"
        )
    _registered[name] = build
    return build


def make_schedule(name: str, ranks: int, microbatches: int, **options: Any) -> Schedule:
    """Make the schedule `name` for one step of `microbatches` microbatches over `ranks` ranks.

    Its `.stages` is the number of stages into which the model is split, and does not depend on
    `microbatches`. Raises ConfigError for an unknown name or option, a bad value, and a registered
    schedule with faults.
    """
    known = registry()
    if name not in known:
        raise ConfigError("pipeline.schedule", name, "not a schedule", nearest(name, known))
    for field, value in (("ranks", ranks), ("microbatches", microbatches)):
        if type(value) is not int or value < 1:
            raise ConfigError(
                f"pipeline.{field}",
                value,
                "a schedule needs at least one",
                "use a whole number from 1",
            )
    check_options(name, known[name], options)
    made = known[name](ranks, microbatches, **options)
    if name in _registered:
        require_valid(made)
    return made


def summarize(name: str) -> Callable[..., ScheduleSummary] | None:
    """The function that computes a schedule's ScheduleSummary; None for a registered schedule. For
    "solved" it is that of 1F1B, as a first guess.

    Raises ConfigError for an unknown name.
    """
    known = registry()
    if name not in known:
        raise ConfigError("pipeline.schedule", name, "not a schedule", nearest(name, known))
    return _summaries().get(name, one_f_one_b.summarize) if name in builtin_schedules() else None


@cache
def _summaries() -> dict[str, Callable[..., ScheduleSummary]]:
    return {
        name: module.summarize for name, module in _modules().items() if "summarize" in vars(module)
    }


def min_microbatches(name: str, ranks: Array) -> Array:
    """The fewest microbatches at which a schedule of the folder has the bubble that it states."""
    rule = getattr(_modules()[name], "min_microbatches", None)
    return ranks if rule is None else rule(ranks)


def microbatch_multiple(name: str, ranks: Array) -> Array:
    """The number that must divide the microbatches for the bubble that a schedule states."""
    rule = getattr(_modules()[name], "microbatch_multiple", None)
    return np.ones_like(ranks) if rule is None else rule(ranks)


@cache
def plannable_schedules() -> tuple[str, ...]:
    """The synchronous schedules of the folder that depend on ranks and microbatches alone, the
    default first."""
    names = [
        name
        for name, module in _modules().items()
        if not getattr(module, "NEEDS_COSTS", False) and not module.build(2, 4).versions
    ]
    return tuple(sorted(names, key=lambda name: name != DEFAULT_SCHEDULE))


def is_searched(name: str) -> bool:
    """Whether the planner proposes this schedule of the folder by itself."""
    return getattr(_modules()[name], "SEARCHED", True)


def require_valid(schedule: Schedule) -> None:
    """Raise ConfigError with the first faults of a schedule, if it has any."""
    if faults := find_faults(schedule):
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        raise ConfigError(
            "pipeline.schedule",
            schedule.name,
            "; ".join(faults[:3]) + more,
            "`weft.pipeline.validate.find_faults(schedule)` lists every fault",
        )


@cache
def builtin_schedules() -> dict[str, Builder]:
    """Name -> the function that makes the schedule, for the files of this folder."""
    return {name: module.build for name, module in _modules().items()}


@cache
def _modules() -> dict[str, ModuleType]:
    names = [info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_")]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return {module.NAME: module for module in modules}


def check_options(name: str, build: Builder, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that `build` does not have."""
    parameters = list(inspect.signature(build).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    takes = [p.name for p in parameters[2:]]
    for option, value in options.items():
        if option not in takes:
            fix = nearest(option, takes) if takes else "it takes none"
            raise ConfigError(f"pipeline.{option}", value, f"{name} has no such option", fix)
