"""Straight lines through measured times, fitted so that a few disturbed measurements do not
count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

TURNS = 50
NEAR = 1e-3  # of relative errors, below which one counts no more than another


class FittedLine(NamedTuple):
    """seconds = count * fixed_s + amount / rate"""

    fixed_s: float
    rate: float

    @property
    def half(self) -> float:
        """The amount of which half the time is fixed: rate(amount) = rate * amount / (amount +
        half)."""
        return self.fixed_s * self.rate


def fit_line(
    amounts: Sequence[float],
    seconds: Sequence[float],
    counts: Sequence[float] | None = None,
    whole: Sequence[float] | None = None,
) -> FittedLine:
    """The line whose errors have the least sum (iteratively reweighted least squares; Holland &
    Welsch 1977), relative to the `whole` of which the seconds are a part, and which begins at or
    above 0. `counts`: how often what is fixed is there: once, if left out. At least one amount is
    above 0."""
    x, t = np.asarray(amounts, float), np.asarray(seconds, float)
    total = t if whole is None else np.asarray(whole, float)
    often = np.ones(len(t)) if counts is None else np.asarray(counts, float)
    unit = x.max()
    columns, aim = np.stack([often, x / unit], axis=1) / total[:, None], t / total
    weights = np.ones(len(t))

    def solved(keep: list[int]) -> np.ndarray:
        found = np.zeros(2)
        found[keep] = np.linalg.lstsq(
            columns[:, keep] * weights[:, None], aim * weights, rcond=None
        )[0]
        return found

    for _ in range(TURNS):
        found = solved([0, 1])
        if found[0] < 0 or len(t) == 1:
            found = solved([1])
        weights = 1 / np.sqrt(np.maximum(NEAR, np.abs(columns @ found - aim)))
    if found[1] <= 0:  # larger ones take no longer: as good as free
        found[1] = 1e-3 * t.max()
    return FittedLine(float(found[0]), float(unit / found[1]))
