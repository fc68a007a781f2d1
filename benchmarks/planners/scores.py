"""Scores: how far predictions are from what was measured, and what a planner that believes them
loses."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from runs import Run, grouped

Steps = Mapping[str, float]  # run -> predicted seconds of a step
LAYOUTS = 4  # that a group has at least
AXES = ("hidden", "tp", "pp", "dp", "microbatch")


def accuracy(runs: Sequence[Run], steps: Steps) -> dict[str, Any]:
    """Of these runs, those that a planner covers: errors of the step time as shares of what was
    measured."""
    errors = [steps[run.id] / measured(run) - 1 for run in runs if run.id in steps]
    if not errors:
        return {"covered": 0}
    sizes = [abs(error) for error in errors]
    return {
        "covered": len(errors),
        "median": statistics.median(sizes),
        "mean": statistics.fmean(sizes),
        "max": max(sizes),
        "bias": statistics.fmean(errors),
    }


def choosing(runs: Sequence[Run], steps: Steps) -> dict[str, Any]:
    """In groups of layouts of one model: Spearman's correlation, and the time lost by taking the
    layout that is predicted to be the fastest, as a share of the fastest measured. Means over
    groups.

    Seconds are of a sample, for batches differ a little; a layout that was run several times counts
    once, by medians. Where several layouts are predicted to be the fastest, what is lost is their
    mean.
    """
    ranks, losses, layouts = [], [], 0
    for group in grouped(run for run in runs if run.id in steps).values():
        each: dict[Any, list[tuple[float, float]]] = {}
        for run in group:
            each.setdefault(run.layout, []).append(
                (measured(run) / run.batch, steps[run.id] / run.batch)
            )
        if len(each) < LAYOUTS:
            continue
        took = np.array([statistics.median(real for real, _ in times) for times in each.values()])
        said = np.array(
            [statistics.median(predicted for _, predicted in times) for times in each.values()]
        )
        layouts += len(each)
        first = np.isclose(said, said.min(), rtol=1e-9)
        ranks.append(spearman(took, said))
        losses.append(float(took[first].mean() / took.min() - 1))
    if not ranks:
        return {"groups": 0}
    return {
        "groups": len(ranks),
        "layouts": layouts,
        "spearman": statistics.fmean(ranks),
        "lost": statistics.fmean(losses),
        "lost_max": max(losses),
    }


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """0 where all of one are equal."""
    first, second = _ranks(one), _ranks(other)
    if not first.std() or not second.std():
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def measured(run: Run) -> float:
    """Seconds of a step."""
    assert run.time_s is not None, run.id
    return run.time_s


def _ranks(values: np.ndarray) -> np.ndarray:
    """Equal values get the mean of their ranks."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]
