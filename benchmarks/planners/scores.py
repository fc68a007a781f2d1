"""Scores: how far predictions are from what was measured, and what a planner that believes them loses."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rows import Row, grouped

Steps = Mapping[str, float]  # row -> predicted seconds of a step
LAYOUTS = 4  # that a group has at least
AXES = ("hidden", "tp", "pp", "dp", "microbatch")


def accuracy(rows: Sequence[Row], steps: Steps) -> dict[str, Any]:
    """Of these rows, those that a planner covers: errors of the step time as shares of what was measured."""
    errors = [steps[row.id] / measured(row) - 1 for row in rows if row.id in steps]
    if not errors:
        return {"covered": 0}
    sizes = [abs(error) for error in errors]
    return {
        "covered": len(errors), "median": statistics.median(sizes), "mean": statistics.fmean(sizes),
        "max": max(sizes), "bias": statistics.fmean(errors),
    }  # fmt: skip


def choosing(rows: Sequence[Row], steps: Steps) -> dict[str, Any]:
    """In groups of layouts of one model: Spearman's correlation, and the time lost by taking the layout that is
    predicted to be the fastest, as a share of the fastest measured. Means over groups.

    Seconds are of a sample, for batches differ a little; a layout that was run several times counts once, by medians.
    Where several layouts are predicted to be the fastest, what is lost is their mean.
    """
    ranks, losses, layouts = [], [], 0
    for group in grouped(row for row in rows if row.id in steps).values():
        runs: dict[Any, list[tuple[float, float]]] = {}
        for row in group:
            runs.setdefault(row.layout, []).append((measured(row) / row.batch, steps[row.id] / row.batch))
        if len(runs) < LAYOUTS:
            continue
        took = np.array([statistics.median(real for real, _ in each) for each in runs.values()])
        said = np.array([statistics.median(predicted for _, predicted in each) for each in runs.values()])
        layouts += len(runs)
        first = np.isclose(said, said.min(), rtol=1e-9)
        ranks.append(spearman(took, said))
        losses.append(float(took[first].mean() / took.min() - 1))
    if not ranks:
        return {"groups": 0}
    return {
        "groups": len(ranks), "layouts": layouts, "spearman": statistics.fmean(ranks), "lost": statistics.fmean(losses),
        "lost_max": max(losses),
    }  # fmt: skip


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """0 where all of one are equal."""
    first, second = _ranks(one), _ranks(other)
    if not first.std() or not second.std():
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def measured(row: Row) -> float:
    """Seconds of a step of a row that was run."""
    assert row.time_s is not None, row.id
    return row.time_s


def _ranks(values: np.ndarray) -> np.ndarray:
    """Equal values get the mean of their ranks."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]
