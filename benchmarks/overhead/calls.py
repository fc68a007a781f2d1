"""Calls of Python functions in one optimizer step: what a step costs that no kernel does. Unlike
time, they are the same in every run."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from torch import Tensor

PACKAGES = ("weft", "torch", "transformers")


class Side(Protocol):
    """One trainer."""

    def step(self, batch: dict[str, Tensor], /) -> Any: ...


def calls_of(side: Side, batch: dict[str, Tensor]) -> Counter[str]:
    """Calls of each function, "file:function", of a step. Backward on a CPU is in this thread."""
    seen: Counter[Any] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            seen[frame.f_code] += 1

    sys.setprofile(count)
    try:
        side.step(batch)
    finally:
        sys.setprofile(None)
    named: Counter[str] = Counter()
    for code, times in seen.items():
        named[f"{short(code.co_filename)}:{code.co_qualname}"] += times
    return named


def short(file: str) -> str:
    """A file's path from its package on."""
    parts = Path(file).parts
    for package in PACKAGES:
        if package in parts:
            last = len(parts) - 1 - parts[::-1].index(package)
            return "/".join(parts[last:])
    return parts[-1]


def more(weft: Counter[str], plain: Counter[str], most: int = 30) -> list[tuple[str, int]]:
    """The functions that one side calls more often, and how much more; those most first."""
    extra = Counter({name: weft[name] - plain[name] for name in {*weft, *plain}})
    return [(name, n) for name, n in extra.most_common(most) if n > 0]
