"""The signals that tell a run to stop: SIGTERM, and SIGUSR1, which users of SLURM often choose.
No torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP = (signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def on_stop_signal(then: Callable[[], None]) -> Iterator[None]:
    """Within, `then` is called at each of them. Not in another thread than the main one, as under
    Ray: Python lets no other thread handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        then()

    before = {number: signal.signal(number, handle) for number in STOP}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
