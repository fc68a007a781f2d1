"""Which gradient norms and losses `train.skip` and `train.rollback` leave out, by their
definition."""

from __future__ import annotations

from collections.abc import Sequence

SEEN = 64  # values that the median is taken of
FEWEST = 16  # below which every value is usual


def times_usual(value: float, accepted: Sequence[float]) -> float:
    """How many times the median of the last values that were accepted this one is; of a negative
    median, as far above it. 0 if there are too few."""
    last = sorted(accepted[-SEEN:])
    if len(last) < FEWEST:
        return 0.0
    middle = len(last) // 2
    usual = last[middle] if len(last) % 2 else (last[middle - 1] + last[middle]) / 2.0
    if usual == 0.0:
        return 0.0 if value <= 0.0 else float("inf")
    return 1.0 + (value - usual) / abs(usual)
