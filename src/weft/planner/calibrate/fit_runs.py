"""`weft calibrate --fit`: fits an era's constants to measured runs, and checks them on runs held
out.

Every second row of a source is held out: no constant is fitted to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from ..cost.fit import fit_era, fit_layers
from ..cost.hardware import Cluster, Era
from ..cost.layer_correction import main_layer_shape
from ..cost.layout_batch import Array
from .measured_runs import MeasuredRun, predict_steps, read_rows

FREE = ("matmul", "memory", "traffic", "launch_s", "link", "network", "fixed_s")
FEWEST = 4  # rows
ROUNDS = 60  # of the fit: runs are few, and it is soon done


@dataclass(frozen=True)
class FitResult:
    """The era, and of each source the relative errors of rows that it was fitted to, and of those
    held out."""

    era: Era
    errors: Mapping[str, tuple[list[float], list[float]]]


def read_runs(path: Path, device: str) -> list[MeasuredRun]:
    """`device`: the kind of device that they ran on. Raises Refusal with the row and the column
    that is wrong."""
    return read_rows(path, device, "--fit", FEWEST)


def _held_out(runs: Sequence[MeasuredRun]) -> list[bool]:
    """Every second run of a source."""
    seen = Counter[str]()
    found = []
    for one in runs:
        seen[one.source] += 1
        found.append(seen[one.source] % 2 == 0)
    return found


def fit_runs_to_era(runs: Sequence[MeasuredRun], cluster: Cluster, start: Era) -> FitResult:
    """Raises ConfigError."""
    start = start.model_copy(update={"layers": ()})  # which tell of what other constants left
    seconds, held = np.array([one.step_s for one in runs]), _held_out(runs)
    kept = ~np.array(held)

    train = [one for one, out in zip(runs, held, strict=True) if not out]
    era = fit_era(_predict(train, cluster), list(seconds[kept]), start, FREE, rounds=ROUNDS)
    shapes = [main_layer_shape(one.query.work, one.query.choices) for one in train]
    layered = [one for one, at in zip(train, shapes, strict=True) if at is not None]
    if layered:
        at = np.concatenate([at for at in shapes if at is not None])
        era = fit_layers(_predict(layered, cluster), [one.step_s for one in layered], at, era)
    wrong = _predict(runs, cluster)(era) / seconds - 1
    errors: dict[str, tuple[list[float], list[float]]] = {}
    for one, error, out in zip(runs, wrong, held, strict=True):
        errors.setdefault(one.source, ([], []))[out].append(float(error))
    return FitResult(era, errors)


def error_rows(errors: Mapping[str, tuple[list[float], list[float]]]) -> list[str]:
    """A line for each source."""

    def residual_text(found: list[float]) -> str:
        sizes = [abs(each) for each in found]
        return (
            f"{len(sizes)}: median {median(sizes):.1%}, worst {max(sizes):.1%}" if sizes else "none"
        )

    width = max(map(len, errors))
    return [
        f"{name:<{width}}  fitted to {residual_text(train)}; held out {residual_text(out)}"
        for name, (train, out) in errors.items()
    ]


def _predict(runs: Sequence[MeasuredRun], cluster: Cluster) -> Callable[[Era], Array]:
    """Era -> seconds of a step of each."""
    predict = predict_steps(runs, cluster, lambda run: "")
    return lambda era: predict(lambda name: era)
