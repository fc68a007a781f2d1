"""A request to stop the run, from a signal or from what launched it."""

from __future__ import annotations

from typing import Self

import torch
import torch.distributed as dist

from weft.launch import on_stop_signal


class StopRequest:
    """What a run is told to stop by (`launch.signals`), on which all ranks act after the same
    step."""

    def __init__(self) -> None:
        self._asked = False
        self._flag = torch.zeros(1)
        self._work: dist.Work | None = None

    def any_rank_stopped(self) -> bool:
        """Whether any rank had got the signal when it last called this. Called by all ranks after
        every step.

        One number is reduced on the CPU while the next step runs, so the answer is a step late and
        no device waits.
        """
        if not dist.is_initialized():
            return self._asked
        agreed = self._wait()
        self._flag = torch.tensor([float(self._asked)])
        self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, async_op=True)
        return agreed

    def _wait(self) -> bool:
        if self._work is not None:
            self._work.wait()
        return bool(self._flag)

    def _ask(self) -> None:
        self._asked = True

    def __enter__(self) -> Self:
        self._hearing = on_stop_signal(self._ask)
        self._hearing.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._hearing.__exit__(None, None, None)
        if kind is None:  # after an error, peers that are gone would be waited for
            self._wait()
