"""Algorithms of collectives: one file each. The folder is the registry.

A file maps names to the functions that make its algorithms (`ALGORITHMS`); each takes the number
of ranks and its own options.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from weft.core import ConfigError, nearest

from ..algorithm import CollectiveAlgorithm
from ..chunk_states import find_algorithm_faults

FIELD = "--collective"


@cache
def registry() -> Mapping[str, Callable[..., CollectiveAlgorithm]]:
    """Name -> the function that makes the algorithm."""
    found: dict[str, Callable[..., CollectiveAlgorithm]] = {}
    for info in pkgutil.iter_modules(__path__):
        if not info.name.startswith("_"):
            found |= importlib.import_module(f"{__name__}.{info.name}").ALGORITHMS
    return found


def make_algorithm(name: str, ranks: int, **options: Any) -> CollectiveAlgorithm:
    """Make an algorithm.

    Args:
        name: an algorithm of docs/collectives.md.
        ranks: number of ranks, at least 2.
        **options: of this algorithm.

    Raises:
        ConfigError: an unknown name or option, or an invalid value.

    Example:
        >>> len(make_algorithm("ring", 4).steps)
        6
    """
    known = registry()
    if name not in known:
        raise ConfigError(FIELD, name, "not a collective", nearest(name, known))
    if type(ranks) is not int or ranks < 2:
        raise ConfigError(
            "--ranks", ranks, "a collective needs at least two ranks", "use a number from 2"
        )
    takes = [*inspect.signature(known[name]).parameters][1:]
    for option, value in options.items():
        if option not in takes:
            fix = nearest(option, takes) if takes else "it takes none"
            raise ConfigError(f"--set {option}", value, f"{name} has no such option", fix)
    made = known[name](ranks, **options)
    assert not (faults := find_algorithm_faults(made)), faults
    return made
