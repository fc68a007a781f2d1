"""The report of a simulation, as text, as JSON and as pictures."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.text import Text

from weft.core import (
    REPLICA_AXIS,
    ConfigError,
    text_table,
    translate,
)
from weft.pipeline import (
    AxisMark,
    ChartAxis,
    Curve,
    Timeline,
    draw,
    draw_curves,
    number_text,
    print_for_terminal,
    seconds_text,
    share_text,
    stack_images,
)
from weft.report import page_html, plan_page

from ..cost.hardware import GIB
from .failures import FailureCost, SaveInterval
from .replica_comparison import ReplicaComparison
from .scaling import ScalingPoint
from .scenario import Scenario, StepParts
from .stragglers import StragglerRow

BAR = 40  # columns of the longest bar
MOST_SPANS = 5000  # of a timeline among the figures
STAGES = 6  # lines of one kind, above which only the cheapest and the dearest are shown


@dataclass(frozen=True)
class SimulationReport:
    """`acted`: the actions of one pipeline; `timeline`: with what follows; `factor`: a measured
    step is at most so many times shorter or longer in 80 of 100 cases. What was not asked for is
    empty."""

    setup: Scenario
    step: StepParts
    acted: Timeline
    timeline: Timeline
    factor: float
    stragglers: Sequence[StragglerRow] = ()
    replicas: Sequence[ReplicaComparison] = ()
    lost: FailureCost | None = None
    scaling: Sequence[ScalingPoint] = ()
    mode: str = ""

    @property
    def title(self) -> str:
        return f"{self.setup.name} on {self.setup.cluster}"

    @property
    def interval_s(self) -> tuple[float, float]:
        """Seconds between which a measured step is in 80 of 100 cases."""
        return self.timeline.makespan_s / self.factor, self.timeline.makespan_s * self.factor


# ---- figures -------------------------------------------------------------------------------------


def report_figures(report: SimulationReport) -> dict[str, Any]:
    """All of them; seconds, bytes, shares."""
    setup, step = report.setup, report.step
    low, high = report.interval_s
    found: dict[str, Any] = {
        "layout": setup.name,
        "cluster": str(setup.cluster),
        "devices": setup.devices,
        "step_s": report.timeline.makespan_s,
        "step_s_low": low,
        "step_s_high": high,
        "estimate_s": step.estimated_s,
        "tokens_per_s": setup.tokens / report.timeline.makespan_s,
        "memory_bytes": step.memory_bytes,
        "fits": step.over_bytes <= 0,
        "after_s": dict(step.after),
        "pipeline": {"schedule": setup.schedule.name, **report.acted.summary()},
    }
    if sum(len(lane.labels) for lane in report.timeline.lanes) <= MOST_SPANS:
        found["timeline"] = json.loads(report.timeline.json())
    if report.stragglers:
        found["stragglers"] = [asdict(row) for row in report.stragglers]
    if report.replicas:
        found["replicas"] = [asdict(row) for row in report.replicas]
    if report.lost:
        lost = report.lost
        found["failures"] = {
            **asdict(lost),
            "best": asdict(lost.best),
            "planned_s": lost.planned_s,
            "expected_s": lost.expected_s,
            "lost_s": lost.lost_s,
        }
    if report.scaling:
        found["scaling"] = {
            "mode": report.mode,
            "points": [asdict(point) for point in report.scaling],
        }
    return found


# ---- text ----------------------------------------------------------------------------------------


def report_text(
    report: SimulationReport, width: int = 120, colour: bool = False, ascii_only: bool = False
) -> Text:
    """Everything, one part under the other."""
    picture = draw.text(
        [(report.title, report.timeline)], width=width, colour=colour, ascii_only=ascii_only
    )
    parts = [picture, Text(_step(report))]
    if len(report.stragglers) > 1:
        parts.append(Text(_stragglers(report.stragglers)))
    if report.replicas:
        parts.append(Text(_replicas(report.replicas)))
    if report.lost:
        parts.append(Text(_lost(report.lost, ascii_only)))
    if report.scaling:
        parts.append(Text(_scaling(report)))
    return Text("\n\n").join(parts)


def print_report(report: SimulationReport) -> None:
    """Print it: as wide as the terminal, in colours where it has them."""
    print_for_terminal(partial(report_text, report))


def _step(report: SimulationReport) -> str:
    step, total = report.step, report.timeline.makespan_s
    parts = [f"pipeline {seconds_text(report.acted.makespan_s)}"]
    parts += [f"{name} {seconds_text(seconds)}" for name, seconds in step.after.items()]
    setup, device = report.setup, report.setup.cluster.hardware.device
    over = (
        f", {step.over_bytes / GIB:.1f} GiB too much: it does not fit"
        if step.over_bytes > 0
        else ""
    )
    low, high = map(seconds_text, report.interval_s)
    closed = f"the estimate's closed form: {seconds_text(step.estimated_s)}"
    lines = [
        f"step {seconds_text(total)} = {' + '.join(parts)}; {closed}",
        f"80 % of steps within {low} and {high}",
        (
            f"{number_text(setup.tokens / total)} tokens/s on {setup.devices:,} devices; "
            f"{step.memory_bytes / GIB:.1f} of {device.memory_gib:g} GiB{over}"
        ),
    ]
    return "\n".join(map(translate, lines))


def _stragglers(rows: Sequence[StragglerRow]) -> str:
    planned = rows[0]
    lines = [[translate("stragglers"), translate("step"), translate("longer"), translate("idle")]]
    few = _few(rows)
    for row in few:
        error = f" +- {seconds_text(row.error_s)}" if row.error_s else ""
        longer = "" if row is planned else share_text(row.step_s - planned.step_s, planned.step_s)
        lines.append(
            [
                translate(row.name),
                seconds_text(row.step_s) + error,
                longer,
                share_text(row.idle, 1),
            ]
        )
    table = text_table(lines, left=(0,))
    if len(few) < len(rows):
        table.append(
            translate(f"only the cheapest and the most expensive of more than {STAGES} places")
        )
    return "\n".join(table)


def _few(rows: Sequence[StragglerRow]) -> list[StragglerRow]:
    """Of a kind that stands for many places the cheapest and the dearest."""
    found: list[StragglerRow] = []
    kinds: dict[str, list[StragglerRow]] = {}
    for row in rows:
        kinds.setdefault(row.name.split(", ")[0], []).append(row)
    for same in kinds.values():
        ends = [min(same, key=lambda row: row.step_s), max(same, key=lambda row: row.step_s)]
        found += same if len(same) <= STAGES else ends
    return found


def _replicas(rows: Sequence[ReplicaComparison]) -> str:
    lines = [
        [
            translate("synchroniser"),
            translate("step as planned"),
            translate("with all of these"),
            translate("throughput"),
        ]
    ]
    first = rows[0].met_s
    for row in rows:
        lines.append(
            [
                translate(row.name),
                seconds_text(row.planned_s),
                seconds_text(row.met_s),
                f"x{first / row.met_s:.3f}",
            ]
        )
    return "\n".join(text_table(lines, left=(0,)))


def hours_text(value: float) -> str:
    return f"{value / 3600:,.4g} h" if value >= 3600 else seconds_text(value)


def _often(lost: FailureCost, each: SaveInterval) -> tuple[str, str]:
    """How often it saves: in time, and in steps."""
    return (
        ("never", "")
        if each.every == lost.steps
        else (hours_text(each.interval_s), f"{each.every:,} steps")
    )


def _lost(lost: FailureCost, ascii_only: bool) -> str:
    faults = lost.faults
    later = f", complete {seconds_text(faults.written_s)} later" if faults.written_s else ""
    head = (
        f"failures: one every {hours_text(faults.mtbf_s)} of the cluster; a checkpoint stops it for"
        f" {seconds_text(faults.pause_s)}{later}; a restart takes {seconds_text(faults.restart_s)}"
    )
    every, goodput = translate("every"), translate("goodput")
    lines = [[translate("save"), every, "", goodput]]
    for each in lost.intervals:
        often = map(translate, _often(lost, each))
        lines.append([translate(each.name), *often, f"{each.goodput:.2%}"])
    drawn, best = lost.drawn, lost.best
    saved = (
        "never saved, which is fastest"
        if best.every == lost.steps
        else f"saved every {best.every:,}"
    )
    bar, most = "#" if ascii_only else "█", max(1 - share for _, share in lost.curve)
    curve = [[every, goodput, translate("lost")]] + [
        [hours_text(interval), f"{share:.2%}", bar * max(1, round(BAR * (1 - share) / most))]
        for interval, share in lost.curve[::4]
    ]
    runs = (
        f"{hours_text(drawn.wall_s)} +- {hours_text(drawn.error_s)} drawn at random,"
        f" {drawn.failures:.4g} failures"
    )
    return "\n".join(
        [
            translate(head),
            *text_table(lines, left=(0,)),
            translate(
                f"{lost.steps:,} steps, {saved}: {hours_text(lost.expected_s)} in place of "
                f"{hours_text(lost.planned_s)}, {hours_text(lost.lost_s)} lost ({runs})"
            ),
            "",
            *text_table(curve, left=(2,)),
        ]
    )


def _scaling(report: SimulationReport) -> str:
    lines = [
        [
            translate("devices"),
            REPLICA_AXIS,
            translate("batch"),
            translate("step"),
            "tokens/s",
            "MFU",
            translate("exposed"),
            translate("efficiency"),
        ]
    ]
    for point in report.scaling:
        lines.append(
            [
                f"{point.devices:,}",
                f"{point.dp:,}",
                f"{point.batch:,.0f}",
                seconds_text(point.step_s),
                number_text(point.tokens_per_s),
                share_text(point.mfu, 1),
                share_text(point.exposed, 1),
                share_text(point.efficiency, 1),
            ]
        )
    what = "the same number of samples "
    what += "on each device" if report.mode == "weak" else "in all"
    return "\n".join([translate(f"{report.mode} scaling: {what}"), *text_table(lines, left=())])


# ---- files ---------------------------------------------------------------------------------------


def write_report(path: Path, report: SimulationReport) -> None:
    """What the file's suffix names. Raises ConfigError."""
    makers = {".svg": report_svg, ".html": report_html, ".json": report_perfetto, ".csv": csv_rows}
    if path.suffix not in makers:
        fix = f"name a file that ends in one of {', '.join(makers)}"
        raise ConfigError("--out", str(path), "not a file to draw in", fix)
    try:
        path.write_text(makers[path.suffix](report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "--out", str(path), f"cannot be written ({error})", "name another file"
        ) from None


def report_svg(report: SimulationReport) -> str:
    """The timeline, and the curves that were asked for, under it."""
    pictures = [draw.svg([(report.title, report.timeline)]), *_curves(report)]
    return stack_images(pictures, report.title)


def report_perfetto(report: SimulationReport) -> str:
    return draw.perfetto([(report.title, report.timeline)])


def report_html(report: SimulationReport) -> str:
    """One page, as `weft report --plan` makes it of the figures."""
    return page_html(plan_page(json.loads(report_json(report))))


def csv_rows(report: SimulationReport) -> str:
    """The last table that was asked for. Raises ConfigError where there is none."""
    found: list[dict[str, Any]] = []
    if report.scaling:
        found = [asdict(point) for point in report.scaling]
    elif report.lost:
        found = [
            {"interval_s": interval, "goodput": share} for interval, share in report.lost.curve
        ]
    elif len(report.stragglers) > 1:
        found = [asdict(row) for row in report.stragglers]
    if not found:
        raise ConfigError(
            "--out",
            ".csv",
            "the report has no table to write",
            "add --scale, --mtbf or --slow, or name an .svg",
        )
    text = io.StringIO()
    writer = csv.DictWriter(text, list(found[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return text.getvalue()


def report_json(report: SimulationReport) -> str:
    """All figures of a simulation as JSON; seconds, bytes, shares."""
    return json.dumps(report_figures(report), indent=2, allow_nan=False)


def _curves(report: SimulationReport) -> list[str]:
    found = []
    if report.lost:
        x, y = zip(*report.lost.curve)
        often = [(each, _often(report.lost, each)[0]) for each in report.lost.best_first]
        marks = [AxisMark(f"{each.name}, {every}", each.interval_s) for each, every in often]
        across = ChartAxis("seconds of training between checkpoints", log=True)
        up = ChartAxis("share of time that is training which lasts", near=True, percent=True)
        found.append(
            draw_curves("Goodput", across, up, [Curve("expected", x, y)], _separate_marks(marks))
        )
    if report.scaling:
        points = report.scaling
        devices = [float(point.devices) for point in points]
        across = ChartAxis("devices", log=True, ticks=devices)
        ideal = [points[0].tokens_per_s * n / devices[0] for n in devices]
        speed = [point.tokens_per_s for point in points]
        title = f"{report.mode.capitalize()} scaling"
        named = [Curve("estimated", devices, speed), Curve("ideal", devices, ideal, dashed=True)]
        found.append(draw_curves(title, across, ChartAxis("tokens per second", log=True), named))
        shares = [("efficiency", [p.efficiency for p in points]), ("MFU", [p.mfu for p in points])]
        lines = [Curve(name, devices, values) for name, values in shares]
        found.append(
            draw_curves(f"{title}: shares", across, ChartAxis("share", percent=True), lines)
        )
    return found


def _separate_marks(marks: Sequence[AxisMark]) -> list[AxisMark]:
    """One of those that would be written over one another."""
    found: list[AxisMark] = []
    for mark in marks:
        if not any(0.97 < mark.x / other.x < 1.03 for other in found):
            found.append(mark)
    return found
