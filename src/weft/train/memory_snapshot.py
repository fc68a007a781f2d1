"""`train.memory_snapshot`: what each rank's GPU memory holds, and what allocated it, in a file that
pytorch.org/memory_viz shows. Written after a step, or where memory is at an end before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from weft._torch import cuda_memory
from weft.core import WeftError, replace_file

EVENTS = 200_000  # the latest that are kept: a step of a large model has some 10,000


class MemorySnapshot:
    """Of one rank. `after`: the step after which it is written to the folder; None: nothing is
    recorded, and an end of memory is told alone."""

    def __init__(self, after: int | None, folder: Path):
        self._after, self._folder = after, folder
        self._records = after is not None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Around all that the rank does. Raises WeftError where its GPU's memory is at an end."""
        if self._records:
            cuda_memory.record_allocations(EVENTS)
        try:
            yield
        except torch.OutOfMemoryError as error:
            how = "train.memory_snapshot = 3 would record what uses the memory"
            if self._records:
                how = (
                    f"{self._write()} shows what uses the memory: open it at pytorch.org/memory_viz"
                )
            # its first sentences: how much was asked for, and how much there is
            said = ". ".join(" ".join(str(error).split()).split(". ")[:3])
            fix = "A smaller train.batch, more train.accumulate, train.recompute or fsdp need less"
            raise WeftError(f"rank {_rank()}: {said}. {how}. {fix}.") from error

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step."""
        yield
        if self._records and self._after is not None and number >= self._after:
            self._write()
            cuda_memory.end_recording()
            self._records = False

    def _write(self) -> Path:
        path = self._folder / f"memory-{_rank()}.pickle"
        replace_file(path, cuda_memory.memory_snapshot())
        return path


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
