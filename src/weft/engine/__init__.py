"""One optimizer step under a Plan."""

from .engine import Engine, StepResult
from .remote import Remote

__all__ = ["Engine", "Remote", "StepResult"]
