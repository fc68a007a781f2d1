"""How the blocks of a model are compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
# auto: on CUDA, where blocks repeat
CompileChoice = Literal["auto", "off", "blocks"]


@dataclass(frozen=True)
class CompileOptions:
    """Each block's forward, and the loss, is compiled by torch.compile.

    Args:
        mode: torch.compile's mode.
        backend: torch.compile's backend.
    """

    mode: CompileMode = "default"
    backend: str = "inductor"

    def __str__(self) -> str:
        return f"blocks and loss, by {self.backend} in mode {self.mode}"
