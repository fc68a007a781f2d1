"""The face of a package: names that are imported when they are first used, so that `weft --help`
does not wait for torch."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

Face = tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]


class _Package(ModuleType):
    """A package whose files do not take the place of what they define under their own name, as
    `whole_updates` of `whole_updates.py`, when they are imported."""

    def __setattr__(self, name: str, value: object) -> None:
        own = sys.modules.get(f"{self.__name__}.{name}")
        if value is not own or name not in self.__dict__["same_names"]:
            super().__setattr__(name, value)


def attach_face(package: str, file: str) -> Face:
    """What a package's `__init__.py` takes as its `__getattr__`, `__dir__` and `__all__`: the names
    that the `__init__.pyi` beside it imports.

    Args:
        package: `__name__` there.
        file: `__file__` there.
    """
    homes: dict[str, str] = {}
    for node in ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            home = resolve_name("." * node.level + (node.module or ""), package)
            homes |= {alias.name: home for alias in node.names}
    names, here = sorted(homes), sys.modules[package]
    here.__dict__["same_names"] = {name for name in names if homes[name] == f"{package}.{name}"}
    here.__class__ = _Package

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"No {package} attribute {name}")
        if homes[name] == package:
            found: Any = importlib.import_module(f"{package}.{name}")
        else:
            found = getattr(importlib.import_module(homes[name]), name)
        setattr(here, name, found)  # found at once from now on
        return found

    return find, names.copy, names
