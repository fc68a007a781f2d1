"""weft lays any PyTorch model over any devices, and proves that the numbers are right."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine, Remote, StepResult
    from .layout import Layout
    from .planner import plan
    from .plans import Plan
    from .verification import verify

__version__ = "0.1.0"
__all__ = ["Engine", "Layout", "Plan", "Remote", "StepResult", "plan", "verify"]

_HOMES = {
    "Engine": "engine", "Remote": "engine", "StepResult": "engine", "Layout": "layout", "Plan": "plans",
    "plan": "planner", "verify": "verification",
}  # fmt: skip


_FOLDERS = ("schedule", "sync")  # of strategies that users name in Python


def __getattr__(name: str) -> Any:
    """The names above, when they are first asked for: `weft --help` is not to wait for torch."""
    if name in _FOLDERS:
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
