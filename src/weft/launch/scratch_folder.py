"""Folders of a launcher for as long as it lives: where its ranks meet, and what they say.

Each is locked by the launcher, and by the ranks that it forks. The lock is the kernel's and ends
with them, so what a launcher that was killed has left is told from what is in use. Whoever makes
the next folder removes it. No torch.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import Self

PREFIX = "weft-run-"
NEW_S = 60.0  # since its last change, in which a folder may not be locked yet


class ScratchFolder:
    """A new folder that only this user can read. A context manager, which removes it."""

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()))
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        self._lock = _locked(self.path)

    def remove(self) -> None:
        """Remove it, with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def _locked(path: str | Path) -> int | None:
    """An open handle that holds the folder's lock; None: another has it, or there are no locks."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _sweep(place: Path) -> None:
    """Remove this user's folders that nobody holds."""
    for folder in place.glob(f"{PREFIX}*"):
        try:
            found = folder.lstat()
        except OSError:  # it has just gone
            continue
        mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        if not mine or time.time() - found.st_mtime < NEW_S:
            continue
        handle = _locked(folder)
        if handle is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)
