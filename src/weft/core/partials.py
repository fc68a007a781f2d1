"""The function in a functools.partial."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def function_of_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function whose arguments partials fill, of any depth; another callable itself."""
    while isinstance(function, functools.partial):
        function = function.func
    return function
