"""Output to a terminal that may close before the run ends. No torch."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

STREAMS = (1, 2)


def leave_closed_terminal() -> None:
    """What is written to a terminal that has closed goes nowhere from now on: it would raise."""
    for stream in STREAMS:
        try:
            os.write(stream, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


@contextmanager
def outliving_terminal() -> Iterator[None]:
    """Within, sys.stdout and sys.stderr raise no error where their terminal has closed: the signal
    that says so comes later."""
    with ExitStack() as stack:
        for redirect, stream in ((redirect_stdout, sys.stdout), (redirect_stderr, sys.stderr)):
            if isinstance(stream, io.TextIOWrapper) and stream.isatty():
                stream.flush()
                stack.enter_context(redirect(_outliving(stream)))
        yield


def _outliving(stream: io.TextIOWrapper) -> TextIO:
    raw = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True)


class _Terminal(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            leave_closed_terminal()
            return len(data)
