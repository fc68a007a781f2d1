"""One run at a time writes into a run folder.

The lock is the kernel's: it ends with the process that holds it, so none is ever stale.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weft.core import ConfigError

LOCK = ".lock"
AGAIN_S = 0.5


@contextmanager
def run_lock(output: str, make: bool, patience_s: float = 0.0) -> Iterator[None]:
    """In this context no other run gets the folder. Children that this process forks do not hold
    the lock.

    Args:
        output: the run folder.
        make: make it if it is not there. Otherwise there is nothing to lock.
        patience_s: how long to wait for another run to end, as for ranks that are started anew.

    Raises:
        ConfigError: another run writes there.
    """
    path = Path(output, LOCK)
    try:
        if make:
            path.parent.mkdir(parents=True, exist_ok=True)
        file = _open_locked(path, output, time.monotonic() + patience_s)
    except OSError:  # no folder, or one that cannot be written to, as `check_output` says
        file = None
    try:
        yield
    finally:
        if file is not None:
            with suppress(OSError):
                path.unlink()  # while it is held, so that nobody waits for a file without a name
            os.close(file)


def _open_locked(path: Path, output: str, until: float) -> int:
    while True:
        # never through a link: what it leads to would be emptied
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(file, 200).decode(errors="replace").strip()
            os.close(file)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise  # a file system without locks
            if time.monotonic() < until:
                time.sleep(AGAIN_S)
                continue
            problem = f"another run writes there ({holder or 'it is just starting'})"
            fix = "wait until it has ended, stop it, or name another folder with --output"
            raise ConfigError("output", output, problem, fix) from None
        if path.exists() and os.fstat(file).st_ino == path.stat().st_ino:
            os.truncate(file, 0)
            os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            return file
        os.close(file)  # whoever held it has just ended
