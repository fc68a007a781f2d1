"""`weft calibrate --fit`: fits an era's constants to measured runs, and checks them on runs held
out.

RUNS.csv has a row for each run: `run`, its run file, from the folder of RUNS.csv; `step_s`,
measured; and, where the run file was overridden, `layout`, `batch`, `accumulate`, `recompute`.
`source` says what rows belong together in what is reported. Every second row of a source is held
out: no constant is fitted to it.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from weft.core import ConfigError, load_run

from ..cost.estimate import estimate
from ..cost.fit import fit_era, fit_layers
from ..cost.hardware import Cluster, Era
from ..cost.layer_correction import main_layer_shape
from ..cost.layout_batch import Array, LayoutBatch
from ..cost.model_work import ModelWork
from ..search.query_from_run import RunQuery, query_from_run

COLUMNS = {
    "layout": "layout.axes",
    "batch": "train.batch",
    "accumulate": "train.accumulate",
    "recompute": "train.recompute",
}
KNOWN = ("run", "step_s", "source", *COLUMNS)
FREE = ("matmul", "memory", "traffic", "launch_s", "link", "network", "fixed_s")
FEWEST = 4  # rows
ROUNDS = 60  # of the fit: runs are few, and it is soon done


@dataclass(frozen=True)
class MeasuredRun:
    """One row: what was run, of which run file, and how long a step of it took."""

    file: str
    source: str
    query: RunQuery
    step_s: float
    held: bool


@dataclass(frozen=True)
class FitResult:
    """The era, and of each source the relative errors of rows that it was fitted to, and of those
    held out."""

    era: Era
    errors: Mapping[str, tuple[list[float], list[float]]]


def read_runs(path: Path, device: str) -> list[MeasuredRun]:
    """`device`: the kind of device that they ran on. Raises Refusal with the row and the column
    that is wrong."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            "--fit", str(path), f"cannot be read ({error})", "name a CSV file"
        ) from None
    if len(rows) < FEWEST:
        raise ConfigError(
            "--fit",
            str(path),
            f"has {len(rows)} rows, half of which are held out",
            f"give {FEWEST}",
        )
    for column in (
        *(c for c in rows[0] if c not in KNOWN),
        *(c for c in KNOWN[:2] if c not in rows[0]),
    ):
        raise ConfigError(
            "--fit",
            str(path),
            f"its columns are not those needed: {column}",
            f"use {', '.join(KNOWN)}",
        )
    seen: dict[str, int] = {}
    works: dict[str, ModelWork] = {}  # of each run file: no column changes its model
    found = []
    for number, row in enumerate(rows, 2):
        try:
            step_s = float(row["step_s"])
        except (TypeError, ValueError):
            step_s = 0.0
        if not 0 < step_s < float("inf"):
            raise ConfigError(
                f"--fit line {number}, step_s",
                row["step_s"],
                "is no time",
                "write seconds of a step",
            )
        source = row.get("source") or "runs"
        seen[source] = seen.get(source, 0) + 1
        found.append(
            MeasuredRun(
                row["run"],
                source,
                _make_query(path, row, device, works),
                step_s,
                held=seen[source] % 2 == 0,
            )
        )
    return found


def fit_runs_to_era(runs: Sequence[MeasuredRun], cluster: Cluster, start: Era) -> FitResult:
    """Raises ConfigError."""
    start = start.model_copy(update={"layers": ()})  # which tell of what other constants left
    seconds = np.array([one.step_s for one in runs])
    kept = np.array([not one.held for one in runs])

    train = [one for one in runs if not one.held]
    era = fit_era(_predict(train, cluster), list(seconds[kept]), start, FREE, rounds=ROUNDS)
    shapes = [main_layer_shape(one.query.work, one.query.choices) for one in train]
    layered = [one for one, at in zip(train, shapes, strict=True) if at is not None]
    if layered:
        at = np.concatenate([at for at in shapes if at is not None])
        era = fit_layers(_predict(layered, cluster), [one.step_s for one in layered], at, era)
    wrong = _predict(runs, cluster)(era) / seconds - 1
    errors: dict[str, tuple[list[float], list[float]]] = {}
    for one, error in zip(runs, wrong, strict=True):
        errors.setdefault(one.source, ([], []))[one.held].append(float(error))
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


def _make_query(
    path: Path, row: Mapping[str, Any], device: str, works: dict[str, ModelWork]
) -> RunQuery:
    overrides = {key: _toml(row[column]) for column, key in COLUMNS.items() if row.get(column)}
    found = query_from_run(
        load_run(path.parent / row["run"], overrides), device=device, work=works.get(row["run"])
    )
    works[row["run"]] = found.work
    return found


def _toml(text: str) -> str:
    return text if text.isdigit() else json.dumps(text)


def _predict(runs: Sequence[MeasuredRun], cluster: Cluster) -> Callable[[Era], Array]:
    """Era -> seconds of a step of each. Those of one file on as many devices are priced at once."""
    groups: dict[tuple[str, int], list[int]] = {}
    for place, one in enumerate(runs):
        groups.setdefault((one.file, int(one.query.choices.world[0])), []).append(place)
    priced = [
        (
            places,
            cluster.model_copy(update={"devices": devices}),
            runs[places[0]].query,
            LayoutBatch.joined([runs[place].query.choices for place in places]),
        )
        for (_, devices), places in groups.items()
    ]

    def predict(era: Era) -> Array:
        found = np.zeros(len(runs))
        for places, at, one, choices in priced:
            found[places] = estimate(one.work, choices, at, era, one.practice, one.sync).step_s
        return found

    return predict
