"""Imports packages that only the extras of weft install."""

from __future__ import annotations

import importlib
from typing import Any

from .errors import DataError


def import_extra(module: str, field: str, value: object, extra: str = "hf") -> Any:
    """Import a module that an extra of weft installs.

    Args:
        module: its full name.
        field: what asks for it, for the error.
        value: the value of that.
        extra: the name of the extra.

    Raises:
        DataError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            field,
            value,
            f"needs the package {module.split('.')[0]}",
            f'install it: pip install "weft[{extra}]"',
        ) from error
