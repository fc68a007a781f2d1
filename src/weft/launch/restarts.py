"""Restarts a run whose process died, from its latest whole checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from weft.core import DamagedCheckpoint, WorkerDied

from .log import log_line

T = TypeVar("T")


def run_with_restarts(
    start: Callable[[bool], T],
    latest: Callable[[], int | None],
    set_aside: Callable[[], bool],
    resume: bool,
    restarts: int,
    told: Callable[[int, str], None] = lambda step, text: None,
) -> T:
    """Run, and start again from the latest checkpoint when a process dies.

    It raises the error as it came if there is no checkpoint, if weft itself ended the run (a loss
    that
    is not finite), if the run was told to stop, or if the same error comes twice without a
    checkpoint
    in between.

    Args:
        start: `start(resume)` runs to the end and returns the result.
        latest: step of the latest checkpoint; None: there is none.
        set_aside: quarantines the latest checkpoint, which is damaged; whether an older one is
            left.
        resume: whether the first start resumes.
        restarts: how often to start again at most.
        told: called with the step from which it goes on, and what ended the process before.
    """
    died: tuple[str, int | None] | None = None
    number = 0
    while True:
        try:
            return start(resume)
        except DamagedCheckpoint as error:
            quarantine_damaged(error, set_aside, latest)
        except WorkerDied as error:
            step, how = latest(), error.fault or error.report.strip().splitlines()[-1]
            from_outside = how.startswith(
                ("killed by", "exited with")
            )  # which may come again at any time
            again = died == (how, step) and not from_outside
            if number == restarts or step is None or error.meant or error.stopped or again:
                raise
            number += 1
            died, resume = (how, step), True
            told(step, f"{error.who.rstrip(',')}: {how}")
            log_line(
                f"{error.who.rstrip(',')}: {how}; going on from step {step} ({number} of"
                f" {restarts})"
            )


def quarantine_damaged(
    error: DamagedCheckpoint, set_aside: Callable[[], bool], latest: Callable[[], int | None]
) -> None:
    """Set the latest checkpoint aside, which is damaged. Raises the error if there is none before
    it."""
    if not set_aside():
        raise error
    log_line(f"{error.value}: {error.problem}; set aside, going on from step {latest()}")
