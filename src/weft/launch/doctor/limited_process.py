"""Runs a function in a process of its own with a time limit: it may hang or crash, and this
process goes on."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from typing import IO, Any, NoReturn

from weft.core import Refusal, WeftError

GENTLE_S = 3.0  # from SIGTERM to SIGKILL: it may have files and processes to clean up
# after SIGKILL: who waits for a dead disk does not end even then, and is left to the system
HARD_S = 1.0
POLL_S, FOLLOW_S = 0.005, 0.2


class LimitedProcessError(WeftError):
    """The function raised, its process died, or its time was up."""


def iterate_limited(
    limit_s: float, function: Callable[..., Any], *args: Any
) -> Generator[Any, None, None]:
    """What the generator `function(*args)` yields, or what the function returns. Raises Failed,
    also when nothing has come for `limit_s` seconds."""
    here, there = multiprocessing.Pipe(duplex=False)
    with tempfile.TemporaryFile() as said:
        child = ForkedChild(there, said, function, args)
        try:
            while True:
                if not here.poll(limit_s):
                    raise LimitedProcessError(f"no answer within {limit_s:g} s")
                try:
                    kind, value = pickle.loads(here.recv_bytes())
                except EOFError:
                    raise LimitedProcessError(child.how(said)) from None
                if kind == "end":
                    return
                if kind == "error":
                    raise LimitedProcessError(value)
                yield value
        finally:
            here.close()
            child.end()


def run_limited(limit_s: float, function: Callable[..., Any], *args: Any) -> Any:
    """What `function(*args)` returns. Raises Failed."""
    return next(iterate_limited(limit_s, function, *args))


class ForkedChild:
    """A forked process. Not multiprocessing's: at the end of this one that waits for its own,
    however long."""

    def __init__(
        self, answers: Connection, said: IO[bytes], function: Callable[..., Any], args: tuple
    ):
        self._code: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _live(parent, answers, said, function, args)
        answers.close()

    def ended(self, patience_s: float) -> bool:
        """Whether it has, or does in this time."""
        deadline = time.monotonic() + patience_s
        while self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                return False
            else:
                time.sleep(POLL_S)
        return True

    def how(self, said: IO[bytes]) -> str:
        """How it died, and the last that it said."""
        self.ended(HARD_S)
        code = self._code or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        said.seek(0)
        return ": ".join([how, *said.read().decode(errors="replace").strip().splitlines()[-1:]])

    def end(self) -> None:
        """Gently and then not."""
        for number, patience_s in ((signal.SIGTERM, GENTLE_S), (signal.SIGKILL, HARD_S)):
            if not self.ended(0.0):
                os.kill(self._pid, number)
                self.ended(patience_s)


def _live(
    parent: int, answers: Connection, said: IO[bytes], function: Callable[..., Any], args: tuple
) -> NoReturn:
    """A child's life, which never returns: what stands above in the stack is its parent's."""
    try:
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # Ctrl-C reaches the whole group; the parent decides
        signal.signal(signal.SIGTERM, _leave)
        threading.Thread(target=_follow, args=(parent,), daemon=True).start()
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        try:
            made = function(*args)
            for each in made if isinstance(made, Generator) else [made]:
                answers.send_bytes(pickle.dumps(("result", each)))
            answers.send_bytes(pickle.dumps(("end", None)))
        except BaseException as error:
            answers.send_bytes(pickle.dumps(("error", error_text(error))))
        # Nothing is raised from here on. A blocked signal would not do: another thread takes it,
        # and its handler runs in this one.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    finally:
        os._exit(0)


def error_text(error: BaseException) -> str:
    """In one line: what weft raised as it stands, of a process that died its last words."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    if isinstance(error, Refusal):
        return " ".join(lines)
    return lines[-1] if isinstance(error, WeftError) else f"{type(error).__name__}: {lines[0]}"


def _follow(parent: int) -> None:
    """End this process when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(FOLLOW_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GENTLE_S)
    os._exit(1)


def _leave(number: int, frame: object) -> NoReturn:
    """SIGTERM as an exception, so that files and processes are cleaned up; once."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + number)
