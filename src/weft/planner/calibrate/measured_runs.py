"""Steps that were measured, read from files: from a CSV file with a row for each run, or from the
run folder that `weft train` wrote.

A row has `step_s`, seconds of a step; `run`, its run file, from the folder of the CSV file; and,
where the run file was overridden, `layout`, `batch`, `accumulate`, `recompute`. `source` says what
rows belong together in what is reported.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from pydantic import ValidationError

from weft.core import METRICS, RUN_FILE, ConfigError, RunConfig, load_run, read_file
from weft.train import with_layout

from ..cost.estimate import estimate
from ..cost.hardware import Cluster, Era
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
MOST_BYTES = 1 << 28  # of metrics.jsonl
EraOf = Callable[[RunConfig], str]  # the name of the era that a run is priced with


@dataclass(frozen=True)
class MeasuredRun:
    """What was run, as `run` has it, and how long a step of it took. `file`: the run file, which
    says what may be priced together; `name`: how it is told of."""

    name: str
    file: str
    source: str
    run: RunConfig
    query: RunQuery
    step_s: float


def read_rows(
    path: Path, device: str, option: str, fewest: int = 1, run: RunConfig | None = None
) -> list[MeasuredRun]:
    """The rows of a CSV file.

    Args:
        path: The file.
        device: The kind of device that they ran on.
        option: What named the file, for errors.
        fewest: How many rows there have to be.
        run: The run of rows that name none; without it each names its own.

    Raises:
        Refusal: with the row and the column that is wrong.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            option, str(path), f"cannot be read ({error})", "name a CSV file"
        ) from None
    if len(rows) < fewest:
        raise ConfigError(
            option, str(path), f"has {len(rows)} rows, and {fewest} are needed", f"give {fewest}"
        )
    needed = KNOWN[:2] if run is None else ("step_s", "layout")
    if run is not None and "run" in rows[0]:
        needed = ("step_s",)
    for column in (
        *(c for c in rows[0] if c not in KNOWN),
        *(c for c in needed if c not in rows[0]),
    ):
        problem = f"its columns are not those needed: {column}"
        raise ConfigError(option, str(path), problem, f"use {', '.join(KNOWN)}")
    works: dict[str, ModelWork] = {}  # of each run file: no column changes its model
    found = []
    for number, row in enumerate(rows, 2):
        try:
            step_s = float(row["step_s"])
        except (TypeError, ValueError):
            step_s = 0.0
        if not 0 < step_s < float("inf"):
            raise ConfigError(
                f"{option} line {number}, step_s",
                row["step_s"],
                "is not a time",
                "write seconds of a step",
            )
        made, query = make_query(path, row, device, works, run)
        name, source = f"{path} line {number}", row.get("source") or "runs"
        found.append(MeasuredRun(name, row.get("run") or "", source, made, query, step_s))
    return found


def read_run_folder(folder: Path, device: str, option: str) -> MeasuredRun:
    """The run of a folder that `weft train` wrote: the median of the steps that it logged, without
    the first. `device`: the kind of device that it ran on. Raises Refusal."""
    for name in (RUN_FILE, METRICS):
        if not (folder / name).is_file():
            problem = f"has no {name} beside it" if name == RUN_FILE else f"has no {name}"
            fix = f"name the {METRICS} of a folder that weft train wrote"
            raise ConfigError(option, str(folder / METRICS), problem, fix)
    paces = _paces(folder / METRICS, option)
    if not paces:
        problem = "has no step after the first logged one, whose time includes set-up"
        fix = "train more steps, or lower train.log_every"
        raise ConfigError(option, str(folder / METRICS), problem, fix)
    run = load_run(folder / RUN_FILE)
    query = query_from_run(run, device=device)
    return MeasuredRun(str(folder), str(folder), "runs", run, query, median(paces))


def _paces(path: Path, option: str) -> list[float]:
    """Seconds of a step in each logged line, without the first. Raises ConfigError."""
    try:
        lines = read_file(path, MOST_BYTES).decode(errors="replace").splitlines()
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
        raise ConfigError(option, str(path), problem, "name another file") from None
    found = []
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            seconds = line.get("step_s")
        except (ValueError, AttributeError, RecursionError):
            if number == len(lines):
                break  # the last one of a run that goes on may be half written
            problem = f"line {number} is not a line of {METRICS}"
            raise ConfigError(option, str(path), problem, "name another file") from None
        if type(seconds) in (int, float) and math.isfinite(seconds) and seconds > 0:
            found.append(float(seconds))
    return found[1:]


def make_query(
    path: Path,
    row: Mapping[str, Any],
    device: str,
    works: dict[str, ModelWork],
    run: RunConfig | None = None,
) -> tuple[RunConfig, RunQuery]:
    """What a row was run as. `works`: run file -> its model's work, where that is known; `run`: of
    rows that name none. Raises Refusal."""
    file = row.get("run") or ""
    if file or run is None:
        overrides = {key: _toml(row[column]) for column, key in COLUMNS.items() if row.get(column)}
        made = load_run(path.parent / file, overrides)
    else:
        made = _overridden(path, row, run)
    query = query_from_run(made, device=device, work=works.get(file))
    works[file] = query.work
    return made, query


def _overridden(path: Path, row: Mapping[str, Any], run: RunConfig) -> RunConfig:
    """The run with what a row says of its layout and its training. Raises Refusal."""
    said = {
        column: int(text) if text.isdigit() else text
        for column, key in COLUMNS.items()
        if key.startswith("train.") and (text := row.get(column))
    }
    try:
        train = type(run.train).model_validate(run.train.model_dump() | said)
    except ValidationError as error:
        column = str(error.errors()[0]["loc"][0])
        problem = f"is not a value of train.{column} ({path})"
        raise ConfigError(column, said.get(column), problem, "correct that row") from None
    made = run.model_copy(update={"train": train})
    return with_layout(made, row["layout"]) if row.get("layout") else made


def _toml(text: str) -> str:
    return text if text.isdigit() else json.dumps(text)


def predict_steps(
    runs: Sequence[MeasuredRun], cluster: Cluster, era_of_run: EraOf
) -> Callable[[Callable[[str], Era]], Array]:
    """A function that gives seconds of a step of each run, of one that gives the era of a name.
    Those of one file on as many devices are priced at once."""
    groups: dict[tuple[str, int, str], list[int]] = {}
    for place, one in enumerate(runs):
        key = one.file, int(one.query.choices.world[0]), era_of_run(one.run)
        groups.setdefault(key, []).append(place)
    priced = [
        (
            places,
            era,
            cluster.model_copy(update={"devices": devices}),
            runs[places[0]].query,
            LayoutBatch.joined([runs[place].query.choices for place in places]),
        )
        for (_, devices, era), places in groups.items()
    ]

    def predict(era: Callable[[str], Era]) -> Array:
        found = np.zeros(len(runs))
        for places, name, at, one, choices in priced:
            made = estimate(one.work, choices, at, era(name), one.practice, one.sync)
            found[places] = made.step_s
        return found

    return predict
