"""Outliers among losses and gradient norms, above and below zero."""

from __future__ import annotations

import math

from weft.core.outlier_filter import LEAST, WINDOW, OutlierFilter


def test_outliers() -> None:
    spikes = OutlierFilter(2.0)
    assert spikes.reject(math.inf) == "is inf"
    assert spikes.reject(100.0) is None  # nothing to compare with
    for _ in range(2, LEAST):
        assert spikes.reject(1.0) is None
    assert spikes.reject(9.0) is None  # one too few
    assert spikes.reject(2.0) is None and spikes.reject(2.1) == "is 2.1, where 1 is usual"
    spikes.restore([1.0] * (LEAST - 1))
    assert spikes.reject(9.0) is None
    spikes = OutlierFilter(2.0)
    for number in range(LEAST + WINDOW):
        assert spikes.reject(1.0 if number < LEAST else 2.0) is None
    assert spikes.reject(4.0) is None and spikes.reject(4.1) == "is 4.1, where 2 is usual"
    assert spikes.reject(math.nan) == "is nan"
    for usual, fine, bad in ((-1.0, -1.1, 0.1), (0.0, -1.0, 1e-9)):
        spikes.restore([usual] * LEAST)
        assert spikes.reject(fine) is None and spikes.reject(bad) is not None
    assert OutlierFilter(None).reject(math.nan) is None
