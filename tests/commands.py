"""`weft ...` as a process of its own: forked from the tests, which have imported already what it
takes seconds to."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from weft.cli.app import main

CONTEXT = multiprocessing.get_context("fork")
PATH = os.pathsep.join(
    [str(Path(__file__).parents[1]), *sys.path]
)  # of interpreters that a command starts


class Command:
    """As `subprocess.Popen` has it; what it says goes to a file."""

    def __init__(self, log: Path, *arguments: str):
        self.log = log
        self._process = CONTEXT.Process(target=_run, args=(log, arguments))
        self._process.start()
        atexit.register(self.kill)  # before those that are left would be waited for
        self.pid = self._process.pid or 0

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("weft", timeout, self.said())
            time.sleep(0.02)
        return code

    def communicate(self, timeout: float) -> tuple[str, None]:
        self.wait(timeout)
        return self.said(), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def children(self) -> list[int]:
        """The processes that it has started."""
        return children(self.pid)


def children(pid: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except FileNotFoundError:  # it has ended
        return []


def launched(launcher: tuple[str, ...], *arguments: str) -> subprocess.Popen[str]:
    """By another program than weft, such as torchrun: in a new interpreter."""
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, "weft", *arguments],
        env={**os.environ, "PYTHONPATH": PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _run(log: Path, arguments: tuple[str, ...]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(file, standard)
    os.environ["PYTHONPATH"] = PATH
    sys.argv = ["weft", *arguments]
    with (
        os.fdopen(1, "w", 1, closefd=False) as sys.stdout,
        os.fdopen(2, "w", 1, closefd=False) as sys.stderr,
    ):
        main()
