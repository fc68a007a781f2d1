"""OutlierFilter: which losses and gradient norms are far above those of the steps before."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

WINDOW = 64  # accepted values that the median is taken of
LEAST = 16  # accepted values below which only finiteness is checked


class OutlierFilter:
    """Accepts a value that is finite and at most `limit` times the median of the last 64 accepted
    (as far above the median, where that is negative).

    Args:
        limit: above 1. None: every value is accepted.

    Example:
        spikes = OutlierFilter(3.0)
        reason = spikes.reject(loss)  # None: accepted, and remembered
    """

    def __init__(self, limit: float | None):
        self.limit = limit
        self.recent: deque[float] = deque(maxlen=WINDOW)

    def reject(self, value: float) -> str | None:
        """Why this value is an outlier; None: it is accepted, and remembered."""
        if self.limit is None:
            return None
        if not math.isfinite(value):
            return f"is {value}"
        usual = median(self.recent) if len(self.recent) >= LEAST else math.inf
        if value > usual + (self.limit - 1) * abs(usual):
            return f"is {value:.4g}, where {usual:.4g} is usual"
        self.recent.append(value)
        return None

    def restore(self, values: Iterable[float]) -> None:
        """Replace what is remembered by the values of a checkpoint."""
        self.recent.clear()
        self.recent.extend(map(float, values))
