"""A stopwatch that all ranks press together: each does the same work at the same time, as in a training step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist

from ..timing import once, typical

ROUNDS, FEWEST = 9, 3
ROUND_S = 4e-3  # a round has as many calls as take so long
LIMIT_S = 0.6  # of all rounds together, as far as the fewest allow it


@dataclass(frozen=True)
class Bench:
    """Of one rank of a process group: the device that it computes on."""

    device: torch.device

    @classmethod
    def here(cls) -> Self:
        """This rank's: its GPU over NCCL, or the CPU."""
        gpu = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())
        return cls(torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu"))

    def __call__(self, work: Callable[[], object]) -> float:
        """Seconds of one call, the same number on every rank: the mean of what is typical on each."""
        work()
        first = self.agreed(once(work, self.device))
        calls = max(1, math.ceil(ROUND_S / first))
        rounds = min(ROUNDS, max(FEWEST, int(LIMIT_S / (calls * first))))
        return self.agreed(typical([self._round(work, calls) / calls for _ in range(rounds)]))

    def _round(self, work: Callable[[], object], calls: int) -> float:
        def all_calls() -> None:
            for _ in range(calls):
                work()

        dist.barrier()
        return once(all_calls, self.device)

    def agreed(self, number: float) -> float:
        """The mean over ranks, so that all decide alike what is measured next."""
        shared = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(shared)
        return float(shared) / dist.get_world_size()
