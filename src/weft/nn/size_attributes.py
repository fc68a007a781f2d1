"""Whole numbers that the methods of a module read: among them its numbers of heads and features."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FunctionType

from torch import nn

from .config_values import config_value


def numbers_read(module: nn.Module) -> Iterator[tuple[str, int]]:
    """(attribute, value) of the whole numbers of a module that its methods read; "config.heads" is
    one of its configuration."""
    read = _names_read(type(module))  # type: ignore[arg-type]  # a class has a hash
    for key, value in vars(module).items():
        if type(value) is int and key in read:
            yield key, value
    config = vars(module).get("config")
    if config is not None and "config" in read:
        for key in sorted(read - set(vars(module))):
            if type(value := config_value(config, key)) is int:
                yield f"config.{key}", value


_NOT_FORWARD = ("__init__", "__repr__", "extra_repr", "reset_parameters")


@lru_cache(maxsize=4096)
def _names_read(kind: type[nn.Module]) -> frozenset[str]:
    """The names that the code of a module's methods has, but for that which makes the module."""
    names: set[str] = set()

    def gather(code: CodeType) -> None:
        names.update(code.co_names)
        for const in code.co_consts:
            if isinstance(const, CodeType):
                gather(const)

    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for name, method in vars(base).items():
            if isinstance(method, FunctionType) and name not in _NOT_FORWARD:
                gather(inspect.unwrap(method).__code__)
    return frozenset(names)
