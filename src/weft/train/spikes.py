"""Losses that are not to be gone on from: not finite, or far above the recent ones."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

WINDOW, LEAST = 64, 16  # losses that are remembered, and of which there must be so many before one is judged by them


class Spikes:
    """`limit`: how many times the median of the last losses is too much; None: nothing is judged."""

    def __init__(self, limit: float | None):
        self._limit = limit
        self._recent: deque[tuple[int, float]] = deque(maxlen=WINDOW)

    def judge(self, step: int, loss: float) -> str | None:
        """What is wrong with this loss; if nothing is, it is remembered."""
        if self._limit is None:
            return None
        if not math.isfinite(loss):
            return f"is {loss}"
        usual = median(loss for _, loss in self._recent) if len(self._recent) >= LEAST else math.inf
        if loss > self._limit * usual:
            return f"is {loss:.4g}, {loss / usual:.3g} times the usual {usual:.4g}"
        self._recent.append((step, loss))
        return None

    def back_to(self, step: int) -> None:
        """Forget the losses of later steps."""
        kept = [each for each in self._recent if each[0] <= step]
        self._recent.clear()
        self._recent.extend(kept)
