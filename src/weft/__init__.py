"""weft lays any PyTorch model over any devices, and proves that the numbers are right."""

from .engine import Engine, StepResult
from .layout import Layout
from .planner import plan
from .plans import Plan
from .verification import verify

__version__ = "0.1.0"
__all__ = ["Engine", "Layout", "Plan", "StepResult", "plan", "verify"]
