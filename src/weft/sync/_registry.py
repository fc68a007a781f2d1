"""Synchronisers: one file each. The folder is the registry.

A file maps names to the functions that make its synchronisers (`SYNCS`): each takes a codec and its
own options.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from weft.core import Codec, ConfigError, Sync, nearest

from . import codecs


@cache
def registry() -> Mapping[str, Callable[..., Sync]]:
    """Name -> the function that makes the synchroniser."""
    found: dict[str, Callable[..., Sync]] = {}
    for info in pkgutil.iter_modules([os.path.dirname(__file__)]):
        if not info.name.startswith("_") and not info.ispkg:
            found |= importlib.import_module(f"{__package__}.{info.name}").SYNCS
    return found


def make_sync(
    name: str, codec: str | Mapping[str, Any] | Codec = "identity", **options: Any
) -> Sync:
    """Make the synchroniser of this name.

    Args:
        name: a synchroniser of docs/sync.md.
        codec: a codec of docs/codecs.md: a name, a table with a name and options such as
            `{"name": "powersgd", "rank": 8}`, or a Codec.
        **options: options of this synchroniser.

    Raises:
        ConfigError: an unknown name or option, or an invalid value.

    Example:
        >>> make_sync("local_sgd", period=20, codec="int8").name
        'local_sgd'
    """
    known = registry()
    if name not in known:
        raise ConfigError("sync.name", name, "not a synchroniser", nearest(name, known))
    parameters = [p for p in inspect.signature(known[name]).parameters if p != "codec"]
    for option in options:
        if option not in parameters:
            fix = nearest(option, parameters) if parameters else f"{name} takes no option but codec"
            raise ConfigError(f"sync.{option}", options[option], f"is not an option of {name}", fix)
    if isinstance(codec, str):
        codec = codecs.make_codec(codec)
    elif isinstance(codec, Mapping):
        arguments = dict(codec)
        codec = codecs.make_codec(str(arguments.pop("name", None)), **arguments)
    elif not isinstance(codec, Codec):
        raise ConfigError(
            "sync.codec",
            codec,
            "is neither a name nor a codec",
            "write a name, or a table with one",
        )
    return known[name](codec, **options)
