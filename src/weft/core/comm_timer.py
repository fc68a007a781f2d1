"""How long exchanges take, and how long they are waited for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class CommTimer:
    """Seconds in which something was under way, from the first of what is waited for together, and
    those spent in waiting, as the host sees it."""

    def __init__(self) -> None:
        self.busy_s = self.exposed_s = 0.0
        self._began: float | None = None

    def begin(self) -> None:
        """An exchange begins."""
        if self._began is None:
            self._began = time.perf_counter()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the wait for all that has begun."""
        since = time.perf_counter()
        yield
        now = time.perf_counter()
        self.exposed_s += now - since
        self.busy_s += now - (since if self._began is None else self._began)
        self._began = None
