"""A thread's frame is read while others start."""

from __future__ import annotations

import subprocess
import sys
import threading

from weft.launch.thread_frame import thread_frame

# In a process of its own: what is held to would hang without end.
BUSY = """
import gc, threading, time
from weft.launch.thread_frame import thread_frame

class Slow:
    def __init__(self):
        self.me = self
    def __del__(self):
        time.sleep(0.001)  # gives up the GIL, as destructors of torch do

def start():
    for _ in range(300):
        thread = threading.Thread(target=Slow)
        thread.start()
        thread.join()

gc.set_threshold(1)
starts = threading.Thread(target=start, daemon=True)
starts.start()
while starts.is_alive():
    Slow()
    assert thread_frame(threading.get_ident()) is not None
assert gc.isenabled()
"""


def test_garbage_beside_threads_that_start_blocks_none() -> None:
    subprocess.run([sys.executable, "-c", BUSY], check=True, timeout=120)


def test_a_thread_that_has_ended_has_none() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert thread.ident is not None and thread_frame(thread.ident) is None
