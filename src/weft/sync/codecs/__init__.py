"""Codecs: one file each. The folder is the registry.

A file maps names to the functions that make its codecs (`CODECS`); their arguments are the codec's
options. In a run file: `codec = "int4"`, or with options `codec = { name = "powersgd", rank = 8 }`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from weft.core import Codec, ConfigError, nearest

FIELD = "sync.codec"


@cache
def registry() -> Mapping[str, Callable[..., Codec]]:
    """Name -> the function that makes the codec."""
    found: dict[str, Callable[..., Codec]] = {}
    for info in pkgutil.iter_modules(__path__):
        if not info.name.startswith("_"):
            found |= importlib.import_module(f"{__name__}.{info.name}").CODECS
    return found


def make_codec(name: str, **options: Any) -> Codec:
    """Make the codec of this name. Raises ConfigError for an unknown name or option, or a bad
    value."""
    known = registry()
    if name not in known:
        raise ConfigError(FIELD, name, "not a codec", nearest(name, known))
    parameters = inspect.signature(known[name]).parameters
    for option in options:
        if option not in parameters:
            fix = nearest(option, parameters) if parameters else f"write codec = {name!r} alone"
            raise ConfigError(
                f"{FIELD}.{option}", options[option], f"is not an option of {name}", fix
            )
    return known[name](**options)
