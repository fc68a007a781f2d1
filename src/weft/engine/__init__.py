"""One optimizer step under a Plan."""

from .engine import Engine, StepResult

__all__ = ["Engine", "StepResult"]
