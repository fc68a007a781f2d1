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
        async_tp: overlap the gathers and scattered sums of `tp+sequence` with the matmuls after and
            before them, by inductor, over memory that GPUs share.
    """

    mode: CompileMode = "default"
    backend: str = "inductor"
    async_tp: bool = False

    @property
    def records_cuda_graphs(self) -> bool:
        """Whether inductor's mode records CUDA graphs."""
        return self.mode in ("reduce-overhead", "max-autotune")

    def __str__(self) -> str:
        overlapped = ", tp overlapped with matmuls" if self.async_tp else ""
        return f"blocks and loss, by {self.backend} in mode {self.mode}{overlapped}"
