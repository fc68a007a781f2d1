"""A stopwatch for all ranks at once: each does the same work at the same time, as in a training
step."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist

from weft.core import time_once, typical_time

ENOUGH, FEWEST = 7, 3  # rounds
ROUND_S = 2e-3  # a round has as many calls as take so long
TICK_S = 1e-8
LIMIT_S = 0.6  # of all rounds together, as far as the fewest allow it


@dataclass(frozen=True)
class RankTimer:
    """Of one rank of a process group: the device that it computes on."""

    device: torch.device

    @classmethod
    def here(cls) -> Self:
        """This rank's: its GPU over NCCL, or the CPU."""
        gpu = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())
        return cls(
            torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        )

    def __call__(self, work: Callable[[], object], waits: bool = False) -> float:
        """Seconds of one call, the same number on every rank: of the mean over ranks, what is
        typical of rounds in which no rank was interrupted, or was least. On a CPU those that the
        thread computed, and other programs did not, unless the work `waits` for other ranks."""
        own = self.device.type == "cpu" and not waits
        clock = time.thread_time if own else time.perf_counter
        work()
        calls = max(
            1,
            math.ceil(
                ROUND_S / max(TICK_S, self.mean_over_ranks(time_once(work, self.device, clock))[0])
            ),
        )
        rounds: list[tuple[float, float]] = []  # interruptions, seconds
        spent, clean = 0.0, 0
        while clean < ENOUGH and (len(rounds) < FEWEST or spent < LIMIT_S):
            interrupted, seconds, wall_s = self._round(work, calls, clock)
            rounds.append((interrupted, seconds))
            spent += wall_s
            clean += interrupted == 0
        return (
            typical_time([seconds for _, seconds in sorted(rounds)[: max(clean, FEWEST)]]) / calls
        )

    def _round(
        self, work: Callable[[], object], calls: int, clock: Callable[[], float]
    ) -> list[float]:
        def all_calls() -> None:
            for _ in range(calls):
                work()

        dist.barrier()
        before, since = _interruptions(), time.monotonic()
        seconds = time_once(all_calls, self.device, clock)
        return self.mean_over_ranks(_interruptions() - before, seconds, time.monotonic() - since)

    def mean_over_ranks(self, *numbers: float) -> list[float]:
        """The means over ranks, so that all decide alike what is measured next."""
        shared = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(shared)
        return (shared / dist.get_world_size()).tolist()


def _interruptions() -> int:
    """How often this process has had to give up a processor, as another program wanted it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
