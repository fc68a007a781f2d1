"""torch.load where tensors have no elements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def load_elements() -> Iterator[None]:
    """In this context torch.load gives tensors with their elements: under a mode of tensors without
    elements it would leave them out."""
    load = torch.load

    @wraps(load)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():  # torch.load looks for such modes itself
            return load(*args, **kwargs)

    torch.load = run
    try:
        yield
    finally:
        torch.load = load
