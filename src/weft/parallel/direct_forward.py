"""Hooks of modules whose `forward` the model calls itself, as `layer.forward(x)`.

Such a call passes over the module's hooks, which gather its weights and divide its activations. It
is made a call of the module."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

from torch import nn

from weft.nn import class_tree


def call_forwards_with_hooks(model: nn.Module) -> None:
    """Where a class of the model calls `forward` of a module, let every module's hooks run."""
    # FSDP2 makes classes of its own, whose bases are the model's
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    if any(map(_calls_forward, kinds)):
        for module in model.modules():
            module.forward = _hooked(module)  # type: ignore[method-assign]


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """What runs where the module is called, once its hooks have run."""
    inside = getattr(module.forward, "inside", None)
    return module.forward if inside is None else inside[0]


def set_own_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Put `forward` in the place of `own_forward(module)`."""
    inside = getattr(module.forward, "inside", None)
    if inside is None:
        module.forward = forward  # type: ignore[method-assign]
    else:
        inside[:] = [forward]


def _hooked(module: nn.Module) -> Callable[..., Any]:
    """What takes the place of `module.forward`."""
    inside: list[Callable[..., Any]] = [module.forward]
    called = [False]  # whether the module is, whose hooks then run

    def enter(*_: Any) -> None:
        called[:] = [True]

    @wraps(module.forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not called[0]:
            return module(*args, **kwargs)
        called[:] = [False]
        return inside[0](*args, **kwargs)

    module.register_forward_pre_hook(enter, prepend=True)
    run.__dict__["inside"] = inside
    return run


@lru_cache(maxsize=4096)
def _calls_forward(kind: type) -> bool:
    if not _file_calls_forward(kind):
        return False  # else a large class, such as one that generates text, takes half a second
    calls = (node.func for node in ast.walk(class_tree(kind)) if isinstance(node, ast.Call))
    return any(
        isinstance(called, ast.Attribute) and called.attr == "forward" and _is_module(called.value)
        for called in calls
    )


def _file_calls_forward(kind: type) -> bool:
    """Whether a line of the file that has the class, other than a comment, calls `x.forward`."""
    try:
        file = inspect.getsourcefile(kind)
    except (OSError, TypeError):  # it has no file
        return False
    return file is not None and _FORWARD_CALL.search("".join(linecache.getlines(file))) is not None


_FORWARD_CALL = re.compile(r"^(?!\s*#).*\.\s*forward\s*\(", re.MULTILINE)


def _is_module(called: ast.expr) -> bool:
    """Whether it may be another module: not the module itself, a class, or super()."""
    if isinstance(called, ast.Name):
        return called.id not in ("self", "cls") and not called.id[:1].isupper()
    if isinstance(called, ast.Attribute):
        return not called.attr[:1].isupper()
    return isinstance(called, ast.Subscript)
