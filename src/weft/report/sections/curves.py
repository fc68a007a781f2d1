"""Loss, validation, learning rate and gradient norm; speed and what a step waits for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .. import blocks
from ..read_run import RunRecord, as_number, points
from ..texts import Value, text
from .outcome import speed


def named(runs: Sequence[RunRecord], place: int, name: Value) -> Value:
    """The name of a line: of several runs with the run's before it."""
    return name if len(runs) == 1 else text("of_run", run=runs[place].name, name=name)


def drawn(
    runs: Sequence[RunRecord], key: str, name: Value, style: str = "solid", of: str = "steps"
) -> Iterable[dict[str, Any]]:
    """A line of a metric for each run."""
    for place, run in enumerate(runs):
        found = points(getattr(run, of), key)
        yield blocks.series(named(runs, place, name), found, style, place)


def restarts(runs: Sequence[RunRecord]) -> list[tuple[float, Value]]:
    """Where a run began anew or went back."""
    return [
        (step, text(f"event.{each['event']}"))
        for run in runs
        for each in run.events
        if each.get("event") in ("resumed", "rolled_back")
        and (step := as_number(each.get("step"))) is not None
    ]


def loss(runs: Sequence[RunRecord]) -> blocks.Section | None:
    steps = text("axis.step")
    values = [
        *drawn(runs, "loss", text("loss.train")),
        *drawn(runs, "val_loss", text("loss.validation"), "points", "validations"),
    ]
    charts = [blocks.lines(text("loss.title"), steps, "", values, restarts(runs))]
    others = {
        key
        for run in runs
        for line in run.validations
        for key in line
        if key.startswith("val_") and key != "val_loss"
    }
    for key in sorted(others):
        found = drawn(runs, key, key.removeprefix("val_"), "points", "validations")
        charts.append(blocks.lines(key.removeprefix("val_"), steps, "", found))
    for key in ("grad_norm", "lr"):
        charts.append(
            blocks.lines(text(f"loss.{key}"), steps, "", drawn(runs, key, text(f"loss.{key}")))
        )
    kept = [chart for chart in charts if chart is not None]
    return blocks.section("loss", text("loss.title"), text("loss.intro"), kept)


def pace(runs: Sequence[RunRecord]) -> blocks.Section | None:
    steps, unit = text("axis.step"), speed(runs[0])[0]
    rate = text(f"pace.{unit}")
    seconds = [*drawn(runs, "step_s", text("pace.step_s"))]
    for place, run in enumerate(runs):
        predicted, ends = as_number(run.prediction.get("step_s")), [*points(run.steps, "step_s")]
        if predicted is not None and ends:
            line = [(ends[0][0], predicted), (ends[-1][0], predicted)]
            name = named(runs, place, text("pace.predicted"))
            seconds.append(blocks.series(name, line, "dashed", place))
    waits = [
        line
        for key in ("data_wait_s", "sync_exposed_s", "dispatch_exposed_s")
        for line in drawn(runs, key, text(f"pace.{key}"))
    ]
    charts = [
        blocks.lines(rate, steps, "per_s", drawn(runs, f"{unit}_per_s", rate), restarts(runs)),
        blocks.lines(text("pace.seconds"), steps, "s", seconds),
        blocks.lines(text("pace.waits"), steps, "s", waits),
        blocks.lines(
            text("pace.gpu"), steps, "share", drawn(runs, "gpu_utilization", text("pace.gpu"))
        ),
    ]
    kept = [chart for chart in charts if chart is not None]
    return blocks.section("pace", text("pace.title"), text("pace.intro"), kept)
