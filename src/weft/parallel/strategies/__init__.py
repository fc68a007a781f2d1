"""Parallelisms: one file each. The folder is the registry.

A file names the axis it serves (`AXIS`), the options that may follow it (`OPTIONS`), and emits
Steps: `steps(model, roles, layout, request) -> Iterator[Step]`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from types import ModuleType


def registry() -> Mapping[str, list[ModuleType]]:
    """Axis -> the strategies that serve it, in file order."""
    found: dict[str, list[ModuleType]] = {}
    for module in _modules():
        found.setdefault(module.AXIS, []).append(module)
    return found


def _modules() -> Iterator[ModuleType]:
    for info in pkgutil.iter_modules(__path__):
        yield importlib.import_module(f"{__name__}.{info.name}")
