"""Where another thread of this process is."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

_LOCK = threading.Lock()


def thread_frame(thread: int) -> FrameType | None:
    """The innermost frame of a thread; None if it has ended.

    Args:
        thread: as `threading.get_ident` numbers it.
    """
    # Garbage is not collected meanwhile: Python holds a lock that each new thread needs, and a
    # destructor that waits for the GIL would wait for such a thread without end.
    with _LOCK:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread)
        finally:
            if collects:
                gc.enable()
