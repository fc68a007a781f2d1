"""Imports without looking for garbage among what they make."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_imports() -> Iterator[None]:
    """Around code of a command that imports torch, transformers and what builds on them. No garbage
    is collected inside, and what is there at the end is never looked at again: to traverse the
    million objects of such modules, over and over, takes a fifth of the time to import them."""
    known, collects = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > known:
            gc.freeze()
        if collects:
            gc.enable()
