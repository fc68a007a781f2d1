"""Which functions that weft overrides a model may call, told from its modules, attributes and code
before anything runs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from .config_values import config_value
from .dropout_rng import DROPOUTS
from .random_draws import DRAWS, DRAWS_INSIDE

_DROPOUT_MODULES = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_DROPOUT_NAMES = frozenset(function.__name__ for function in DROPOUTS)
# what draws too: such a forward would be run twice in its first step, with its collectives
_RANDOM_NAMES = frozenset(
    [
        *(function.__name__ for function in (*DRAWS, *DRAWS_INSIDE)),
        "Categorical",
        "randperm",
        "rsample",  # of a distribution
        "sample",
    ]
)
_ROUTING_NAMES = frozenset({"expert_shares", "balance_loss", "with_loss", "within_capacity"})


def may_drop(model: nn.Module) -> bool:
    """Whether a dropout module has a probability above 0; or a module, or its `config`, a number
    above 0 in an attribute that is named like dropout; or a module's code calls a function of torch
    that drops out or draws.

    A function outside of the module's class, which says 0.1 itself, is not found.
    """
    called = _names_called(frozenset(map(type, model.modules())))
    for module in model.modules():
        if isinstance(module, _DROPOUT_MODULES):
            if module.p > 0:
                return True
            continue
        named = called[type(module)]
        config = getattr(module, "config", None)
        if any(_is_probability(*item) for item in vars(module).items()) or any(
            _is_probability(name, config_value(config, name)) for name in named
        ):
            return True
        if any(not hasattr(module, name) for name in named & (_DROPOUT_NAMES | _RANDOM_NAMES)):
            return True  # torch's; otherwise it is the module's own
    return False


def may_route(model: nn.Module) -> bool:
    """Whether a module's code, or a function that it calls by name or has as an attribute, calls
    `weft.nn`'s routing over all tokens."""
    kinds = {type(module) for module in model.modules()}
    held = (f for m in model.modules() for f in vars(m).values() if isinstance(f, FunctionType))
    names = {name for f in held for name in (f.__name__, *_names_in_function(f))}
    return bool(names & _ROUTING_NAMES) or any(
        _names_in_code(kind, True) & _ROUTING_NAMES  # type: ignore[arg-type]
        for kind in kinds
    )


def _is_probability(name: str, value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return "drop" in name and number and value > 0


@lru_cache(maxsize=256)
def _names_called(kinds: frozenset[type[nn.Module]]) -> dict[type[nn.Module], frozenset[str]]:
    """All names that the forward of each of these classes uses, and the methods that the forwards
    of all call."""
    found: dict[type[nn.Module], frozenset[str]] = {}
    called = frozenset[str]()
    while True:
        for kind in kinds:
            own = {n for n in called if getattr(kind, n, None) is not getattr(nn.Module, n, None)}
            found[kind] = _names_in_code(kind, methods=frozenset(own))  # type: ignore[arg-type]
        names = called.union(*found.values())
        if names == called:
            return found
        called = names


@lru_cache(maxsize=4096)
def _names_in_code(
    cls: Hashable, functions: bool = False, methods: frozenset[str] = frozenset()
) -> frozenset[str]:
    """All names that a class's forward uses, and the class's methods that it calls. `functions`:
    and functions of its package that these call. `methods`: that are called from elsewhere."""
    found: set[str] = set()
    todo, seen = ["forward", *methods], {"forward", *methods}
    while todo:
        method: Any = getattr(cls, todo.pop())
        method = getattr(method, "fget", method)
        while hasattr(method, "__wrapped__"):
            method = method.__wrapped__
        if isinstance(method, FunctionType):
            names = {name for code in _codes(method.__code__) for name in code.co_names}
            found |= names
            if functions:
                found |= _names_in_function(method)
            own = {name for name in names - seen if hasattr(cls, name)}
            todo += own
            seen |= own
    return frozenset(found)


@lru_cache(maxsize=4096)
def _names_in_function(function: FunctionType) -> frozenset[str]:
    """All names that a function uses, and the functions of its own package that it calls."""
    found: set[str] = set()
    todo, seen = [function], {function}
    while todo:
        each = todo.pop()
        names = {name for code in _codes(each.__code__) for name in code.co_names}
        found |= names
        for one in [each.__globals__.get(name) for name in names]:
            if isinstance(one, FunctionType) and _package(one) == _package(function):
                todo += [] if one in seen else [one]
                seen.add(one)
    return frozenset(found)


def _package(function: FunctionType) -> str:
    return (function.__module__ or "").partition(".")[0]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
