"""The modules that run now, and in which of them an error was raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def module_calls(
    model: nn.Module, after: Callable[[str, Any], None] = lambda name, output: None
) -> Iterator[list[str]]:
    """Names of the modules that run, the innermost last. After an error it stays as it was then.

    `after`: called with the name and the output of each module that has run.
    """
    inside: list[str] = []
    handles = []

    def leave(name: str, output: Any) -> None:
        inside.pop()
        after(name, output)

    for name, module in model.named_modules():
        # before a boundary's hook, which belongs to the module that it stands around
        handles.append(
            module.register_forward_pre_hook(lambda *_, n=name: inside.append(n), prepend=True)
        )
        handles.append(module.register_forward_hook(lambda *a, n=name: leave(n, a[-1])))
    try:
        yield inside
    finally:
        for handle in handles:
            handle.remove()
