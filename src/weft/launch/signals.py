"""The signals that tell a run to stop: SIGTERM, SIGUSR1, which users of SLURM often choose, and
SIGHUP, with which a terminal closes. No torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from .terminal import leave_closed_terminal, outliving_terminal

STOP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def stop_signals() -> list[signal.Signals]:
    """Those that this process is to hear: nohup has a run outlive its terminal."""
    return [n for n in STOP if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


@contextmanager
def on_stop_signal(then: Callable[[], None]) -> Iterator[None]:
    """Within, `then` is called at each of them. Not in another thread than the main one, as under
    Ray: Python lets no other thread handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        leave_closed_terminal()
        then()

    before = {number: signal.signal(number, handle) for number in stop_signals()}
    try:
        with outliving_terminal():
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
