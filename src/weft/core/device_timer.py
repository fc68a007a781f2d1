"""How long something takes on a device: timed until it is done, many times, and what is typical of
that."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

OUTLIER = 3  # times the median distance from the median


def time_once(
    work: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds by this clock until it is done on the device."""
    wait_for_device(device)
    began = clock()
    work()
    wait_for_device(device)
    return clock() - began


def wait_for_device(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def typical_time(times: Sequence[float]) -> float:
    """The median of those that lie no farther from the median of all than others do: what a pause
    of the machine lengthens is left out."""
    middle = median(times)
    spread = median(abs(each - middle) for each in times)
    return median(each for each in times if abs(each - middle) <= OUTLIER * spread)
