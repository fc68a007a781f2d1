"""A run of one world whose process dies goes on by itself, from its latest checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from ..errors import WorkerDied

T = TypeVar("T")


def survive(start: Callable[[bool], T], latest: Callable[[], int | None], resume: bool, restarts: int) -> T:
    """What `start(resume)` gives. If one of its processes dies it is started anew, to go on from the step that `latest`
    tells, at most `restarts` times.

    It ends with the error as it came where there is no checkpoint to go on from, where weft itself ended the run (a
    loss that is not finite), when it was told to stop, and when it dies of the same twice without a checkpoint between.
    """
    died: tuple[str, int | None] | None = None
    for number in range(restarts + 1):
        try:
            return start(resume)
        except WorkerDied as error:
            step, how = latest(), error.report.strip().splitlines()[-1]
            if number == restarts or step is None or error.meant or error.stopped or died == (how, step):
                raise
            died, resume = (how, step), True
            what = f"rank {error.rank}: {how}; going on from step {step} ({number + 1} of {restarts})"
            print(f"weft: {what}", file=sys.stderr, flush=True)
    raise AssertionError("a last try returns or raises")
