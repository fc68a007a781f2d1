"""Measures how long work takes on a device, and how long communication takes and is waited for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

OUTLIER = 3  # times the median distance from the median


class CommTimer:
    """Adds up communication time as the host sees it.

    `busy_s`: seconds from the start of the first of several exchanges to the end of the wait for
    all of them. `exposed_s`: seconds spent waiting.
    """

    def __init__(self) -> None:
        self.busy_s = self.exposed_s = 0.0
        self._began: float | None = None

    def begin(self) -> None:
        """An exchange begins."""
        if self._began is None:
            self._began = time.perf_counter()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Put this around the wait for all exchanges that have begun."""
        since = time.perf_counter()
        yield
        now = time.perf_counter()
        self.exposed_s += now - since
        self.busy_s += now - (since if self._began is None else self._began)
        self._began = None


def time_once(
    work: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds by `clock` until the device has finished `work`."""
    wait_for_device(device)
    began = clock()
    work()
    wait_for_device(device)
    return clock() - began


def wait_for_device(device: torch.device) -> None:
    """Wait until the device has finished all work that it was given."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def typical_time(times: Sequence[float]) -> float:
    """The median without outliers: times farther from the median than OUTLIER times the median
    distance, such as those that a pause of the machine lengthened."""
    middle = median(times)
    spread = median(abs(each - middle) for each in times)
    return median(each for each in times if abs(each - middle) <= OUTLIER * spread)
