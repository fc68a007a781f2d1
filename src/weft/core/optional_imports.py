"""Imports packages that only the extras of weft install."""

from __future__ import annotations

import importlib
from typing import Any

from .errors import DataError


def import_extra(module: str, field: str, value: object, extra: str = "hf") -> Any:
    """Import a module of an extra. Raises DataError, with this field and value, if it is not
    installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            field,
            value,
            f"needs the package {module.split('.')[0]}",
            f"install it: pip install weft[{extra}]",
        ) from error
