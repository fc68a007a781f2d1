"""Parallelisms: one file each. The folder is the registry.

A file names the axis it serves (`AXIS`), what that axis divides and allows (`TRAITS`) and the
options that may follow it (`OPTIONS`), and emits Steps: `steps(request) -> Iterator[Step]`. A
second file of an axis (sequence.py) has no TRAITS: it serves an option.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cache
from types import ModuleType

from weft.core import EXPERTS_OPTION, AxisTable

from ._request import StepsRequest as StepsRequest

_SPREADS_EXPERTS = {EXPERTS_OPTION: "experts are spread over its ranks"}


def registry() -> Mapping[str, list[ModuleType]]:
    """Axis -> the strategies that serve it, in file order."""
    found: dict[str, list[ModuleType]] = {}
    for module in _modules():
        found.setdefault(module.AXIS, []).append(module)
    return found


@cache
def axis_table() -> AxisTable:
    """The axes of all strategies with their traits, outermost first."""
    found = {m.AXIS: m.TRAITS for m in _modules() if hasattr(m, "TRAITS")}
    return AxisTable(dict(sorted(found.items(), key=lambda item: item[1].order)))


def allowed_options(axis: str) -> Mapping[str, str]:
    """The options that may follow an axis -> what each does."""
    found = {name: text for m in registry()[axis] for name, text in m.OPTIONS.items()}
    return found | (_SPREADS_EXPERTS if axis_table().traits[axis].spreads_experts else {})


def axis_with_option(option: str) -> str:
    """The axis that this option may follow."""
    return next(axis for axis in axis_table().names if option in allowed_options(axis))


def _modules() -> Iterator[ModuleType]:
    for info in pkgutil.iter_modules(__path__):
        if not info.name.startswith("_"):
            yield importlib.import_module(f"{__name__}.{info.name}")
