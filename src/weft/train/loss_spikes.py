"""Losses that are not to be gone on from: not finite, or far above the recent ones."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

WINDOW, LEAST = (
    64,
    16,
)  # losses that are remembered, and of which there must be so many before one is judged by them


class LossSpikeDetector:
    """`limit`: how many times the median of the last losses is too much; None: nothing is
    judged."""

    def __init__(self, limit: float | None):
        self._limit = limit
        self.recent: deque[float] = deque(maxlen=WINDOW)

    def judge(self, loss: float) -> str | None:
        """What is wrong with this loss; if nothing is, it is remembered."""
        if self._limit is None:
            return None
        if not math.isfinite(loss):
            return f"is {loss}"
        usual = median(self.recent) if len(self.recent) >= LEAST else math.inf
        if loss > usual + (self._limit - 1) * abs(
            usual
        ):  # of losses that may be negative, as far above
            return f"is {loss:.4g}, where {usual:.4g} is usual"
        self.recent.append(loss)
        return None

    def remember(self, losses: Iterable[float]) -> None:
        """These, in place of what is remembered: those of a checkpoint."""
        self.recent.clear()
        self.recent.extend(map(float, losses))
