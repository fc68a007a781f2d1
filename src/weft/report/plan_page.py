"""A page of what `weft plan --json` or `weft simulate --json` printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from weft.core import MOST_TEXT_BYTES, ConfigError, read_file
from weft.pipeline import Timeline

from . import blocks
from .read_run import as_number, numbers, tables
from .sections.stages import timeline_blocks
from .texts import Value, number, text

Table = dict[str, Any]
MOST_BARS = 10  # layouts that are drawn part by part
_FIX = "give what weft plan --json or weft simulate --json printed"


def read_figures(path: Path) -> Table:
    """The object in a file; of `-` in standard input. Raises ConfigError."""
    try:
        stdin = str(path) == "-"
        content = sys.stdin.buffer.read() if stdin else read_file(path, MOST_TEXT_BYTES)
        found = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError("--plan", str(path), f"cannot be read ({why})", _FIX) from None
    if not isinstance(found, dict) or not ({"best", "step_s"} & found.keys()):
        raise ConfigError("--plan", str(path), "is neither a plan nor a simulation", _FIX)
    return found


def plan_page(figures: Mapping[str, Any]) -> Table:
    """The page as data (`blocks.py`). A simulation has `step_s`, a plan `best`."""
    simulated = "step_s" in figures
    name = f"{figures.get('layout')}, {figures.get('cluster')}" if simulated else ""
    sections = _simulation(figures) if simulated else _plan(figures)
    return {
        "title": name or str(figures.get("cluster")),
        "kind": "simulation" if simulated else "plan",
        "runs": [],
        "sections": [one for one in sections if one is not None],
    }


def _rows(pairs: Iterable[tuple[str, Value]]) -> list[tuple[Value, Value, str]]:
    return [(text(key), value, "") for key, value in pairs if value is not None]


def _table(value: Any) -> Table:
    return value if isinstance(value, dict) else {}


def _get(table: Mapping[str, Any], key: str, unit: str = "") -> Value:
    return number(as_number(table.get(key)), unit)


# ---- a plan --------------------------------------------------------------------------------------


def _plan(figures: Mapping[str, Any]) -> Iterable[blocks.Section | None]:
    best, model = _table(figures.get("best")), _table(figures.get("model"))
    head = [
        ("plan.best", str(best.get("layout"))),
        ("plan.cluster", str(figures.get("cluster"))),
        ("plan.step_s", _get(best, "step_s", "s")),
        ("plan.tokens_per_s", _get(best, "tokens_per_s", "per_s")),
        ("plan.mfu", _get(best, "mfu", "share")),
        ("plan.held", _get(best, "held_bytes", "bytes")),
        ("plan.run_s", _get(figures, "run_s", "s")),
        ("plan.params", _get(model, "params", "count")),
        ("plan.batch", _get(figures, "batch")),
        ("plan.precision", figures.get("precision") and str(figures["precision"])),
        ("plan.priced", _get(figures, "priced")),
    ]
    notes = [blocks.note(str(said)) for said in figures.get("notes") or [] if isinstance(said, str)]
    yield blocks.section(
        "summary", text("summary.title"), None, [blocks.tiles([*_rows(head), _fits(best)]), *notes]
    )
    rows = tables(figures.get("rows"))
    keys = ("layout", "schedule", "microbatch", "recompute", "step_s", "tokens_per_s", "mfu")
    cells = [
        [
            str(row.get("layout")),
            str(row.get("schedule") or ""),
            _get(row, "microbatch"),
            str(row.get("recompute")),
            _get(row, "step_s", "s"),
            _get(row, "tokens_per_s", "per_s"),
            _get(row, "mfu", "share"),
            _get(row, "held_bytes", "bytes"),
            str(row.get("limited_by") or ""),
        ]
        for row in rows
    ]
    heading = [text(f"plan.{key}") for key in (*keys, "held", "limit")]
    drawn = rows[:MOST_BARS]
    charts = [
        _parts(text("plan.time"), "s", drawn, "time"),
        _parts(text("plan.memory"), "bytes", drawn, "memory"),
        _parts(text("plan.traffic"), "bytes", drawn, "traffic"),
    ]
    yield blocks.section(
        "layouts",
        text("plan.layouts"),
        text("plan.layouts_intro"),
        [blocks.table(heading, cells), *filter(None, charts)] if cells else [],
    )
    yield _explained(_table(figures.get("explained")))
    why = [
        *([one.get("name"), one.get("why")] for one in tables(figures.get("losers"))),
        *([one.get("layout"), one.get("why")] for one in tables(figures.get("refused"))),
        *([one.get("axis"), one.get("why")] for one in tables(figures.get("left_out"))),
    ]
    listed = [[str(name), str(reason)] for name, reason in why]
    table = blocks.table([text("plan.name"), text("plan.reason")], listed)
    yield blocks.section("why", text("plan.why"), None, [table] if listed else [])


def _fits(best: Mapping[str, Any]) -> tuple[Value, Value, str]:
    over = as_number(best.get("over_bytes")) or 0.0
    if over > 0:
        return text("plan.fits"), text("plan.over", bytes=number(over, "bytes")), "bad"
    return text("plan.fits"), "✓", "good"


def _parts(title: Value, unit: str, rows: list[Table], key: str) -> blocks.Block | None:
    """Bars of each layout's parts."""
    found = [numbers(row.get(key)) for row in rows]
    names = [*dict.fromkeys(name for each in found for name in each)]
    parts = [(name, [each.get(name, 0.0) for each in found]) for name in names]
    return blocks.bars(title, unit, [str(row.get("layout")) for row in rows], parts)


def _explained(row: Table) -> blocks.Section | None:
    parts = _table(row.get("parts"))
    shown = []
    for kind, unit in (("time", "s"), ("memory", "bytes")):
        lines = [
            [str(part.get("name")), _get(part, "value", unit), str(part.get("formula") or "")]
            for part in tables(parts.get(kind))
            if as_number(part.get("value"))
        ]
        if lines:
            head = [text(f"plan.{key}") for key in ("part", "value", "formula")]
            shown.append(blocks.table(head, lines, text(f"plan.{kind}")))
    title = text("plan.explained")
    return blocks.section("explained", title, str(row.get("layout")), shown) if shown else None


# ---- a simulation --------------------------------------------------------------------------------


def _simulation(figures: Mapping[str, Any]) -> Iterable[blocks.Section | None]:
    head = [
        ("plan.layout", str(figures.get("layout"))),
        ("plan.cluster", str(figures.get("cluster"))),
        ("plan.devices", _get(figures, "devices")),
        ("plan.step_s", _get(figures, "step_s", "s")),
        ("sim.estimate", _get(figures, "estimate_s", "s")),
        ("plan.tokens_per_s", _get(figures, "tokens_per_s", "per_s")),
        ("plan.held", _get(figures, "memory_bytes", "bytes")),
    ]
    fits = (text("plan.fits"), "✓" if figures.get("fits") else "✗", "")
    tone = "good" if figures.get("fits") else "bad"
    yield blocks.section(
        "summary",
        text("summary.title"),
        None,
        [blocks.tiles([*_rows(head), (*fits[:2], tone)])],
    )
    yield blocks.section("step", text("sim.step"), text("sim.step_intro"), _step(figures))
    rows = [
        [
            str(one.get("name")),
            _get(one, "step_s", "s"),
            _get(one, "idle", "share"),
        ]
        for one in tables(figures.get("stragglers"))
    ]
    heading = [text("sim.where"), text("sim.step_s"), text("sim.idle")]
    chart = blocks.bars(
        text("sim.stragglers"),
        "s",
        [row[0] for row in rows],
        [(text("sim.step_s"), [(row[1] or {}).get("n", 0.0) for row in rows])],
    )
    shown = [*filter(None, [chart]), blocks.table(heading, rows)] if len(rows) > 1 else []
    yield blocks.section("stragglers", text("sim.stragglers"), None, shown)
    agreed = [
        [str(one.get("name")), _get(one, "planned_s", "s"), _get(one, "met_s", "s")]
        for one in tables(figures.get("replicas"))
    ]
    names = [text("plan.name"), text("sim.planned_s"), text("sim.met_s")]
    yield blocks.section(
        "replicas", text("sim.replicas"), None, [blocks.table(names, agreed)] if agreed else []
    )
    yield _failures(_table(figures.get("failures")))
    yield _scaling(_table(figures.get("scaling")))


def _step(figures: Mapping[str, Any]) -> list[blocks.Block]:
    after = numbers(figures.get("after_s"))
    shown = []
    if isinstance(figures.get("timeline"), dict):
        try:
            made = Timeline.from_json(json.dumps(figures["timeline"]))
            shown = timeline_blocks([(text("sim.planned"), made)])
        except ConfigError:
            shown = []
    pipeline = as_number(_table(figures.get("pipeline")).get("makespan_s")) or 0.0
    parts: list[tuple[Value, list[float]]] = [(text("sim.pipeline"), [pipeline])]
    parts += [(name, [seconds]) for name, seconds in after.items()]
    chart = blocks.bars(text("plan.time"), "s", [str(figures.get("layout"))], parts)
    return [*shown, *filter(None, [chart])]


def _failures(lost: Table) -> blocks.Section | None:
    curve = [
        (float(x), float(y))
        for pair in lost.get("curve") or []
        if isinstance(pair, list) and len(pair) == 2
        for x, y in [pair]
        if as_number(x) is not None and as_number(y) is not None
    ]
    best = _table(lost.get("best"))
    every = as_number(best.get("interval_s"))
    marks = [(every, text("sim.save_every"))] if every is not None else []
    chart = blocks.lines(
        text("sim.goodput"),
        text("sim.every_s"),
        "share",
        [blocks.series(text("sim.goodput"), curve)],
        marks,
    )
    steps = _get(best, "every")
    head = [
        ("sim.save_every", steps and text("sim.steps", count=steps)),
        ("sim.expected_s", _get(lost, "expected_s", "s")),
        ("sim.planned_s", _get(lost, "planned_s", "s")),
        ("sim.lost_s", _get(lost, "lost_s", "s")),
    ]
    shown = [blocks.tiles(_rows(head)), chart] if chart is not None else []
    return blocks.section("failures", text("sim.failures"), None, shown)


def _scaling(scaling: Table) -> blocks.Section | None:
    points = [
        {key: as_number(one.get(key)) or 0.0 for key in KEYS}
        for one in tables(scaling.get("points"))
    ]
    if not points:
        return None
    devices, first = text("sim.devices"), points[0]

    def line(name: Value, key: str, style: str = "solid") -> Table:
        return blocks.series(name, [(p["devices"], p[key]) for p in points], style)

    ideal = [
        (p["devices"], first["tokens_per_s"] * p["devices"] / (first["devices"] or 1.0))
        for p in points
    ]
    speed = [
        line(text("sim.estimated"), "tokens_per_s"),
        blocks.series(text("sim.ideal"), ideal, "dashed"),
    ]
    shares = [
        line(text("sim.efficiency"), "efficiency"),
        line(text("plan.mfu"), "mfu"),
    ]
    charts = [
        blocks.lines(text("plan.tokens_per_s"), devices, "per_s", speed, log=True),
        blocks.lines(text("sim.shares"), devices, "share", shares),
    ]
    return blocks.section("scaling", text("sim.scaling"), None, [*filter(None, charts)])


KEYS = ("devices", "tokens_per_s", "efficiency", "mfu")
