"""What a page is made of, as data: sections of blocks. `page.js` draws each kind.

page    {"title", "kind", "runs": names, "sections": [...]}
section {"id", "title", "intro", "blocks": [...]}
block   {"kind": one of the functions below, ...}
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .texts import Value, short

Block = dict[str, Any]
Section = dict[str, Any]

MOST_POINTS = 1200  # of a line
MOST_SPANS = 4000  # of a timeline


def section(key: str, title: Value, intro: Value, blocks: Iterable[Block]) -> Section | None:
    """A part of the page with a heading; None without blocks."""
    found = [*blocks]
    return {"id": key, "title": title, "intro": intro, "blocks": found} if found else None


def note(said: Value, tone: str = "info") -> Block:
    """A sentence. `tone`: info, good, warn or bad."""
    return {"kind": "note", "text": said, "tone": tone}


def tiles(rows: Iterable[tuple[Value, Value, str]]) -> Block:
    """A name, its value and its tone, each in a tile."""
    return {"kind": "tiles", "rows": [list(row) for row in rows]}


def table(head: Sequence[Value], rows: Iterable[Sequence[Value]], caption: Value = None) -> Block:
    return {
        "kind": "table",
        "head": list(head),
        "rows": [list(row) for row in rows],
        "caption": caption,
    }


def code(caption: Value, content: str) -> Block:
    """A text of a file, as it is."""
    return {"kind": "code", "caption": caption, "text": content}


def beside(columns: Iterable[tuple[Value, Sequence[Block]]]) -> Block:
    """Blocks in columns, each with a heading."""
    return {
        "kind": "columns",
        "columns": [{"title": title, "blocks": [*blocks]} for title, blocks in columns],
    }


def series(
    name: Value, points: Iterable[tuple[float, float]], style: str = "solid", run: int = 0
) -> dict[str, Any]:
    """A line of a chart. `style`: solid, dashed or points; `run`: whose colour it has."""
    kept = _thin([(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)])
    return {
        "name": name,
        "x": [short(x) for x, _ in kept],
        "y": [short(y) for _, y in kept],
        "style": style,
        "run": run,
    }


def lines(
    title: Value,
    x: Value,
    unit: str,
    drawn: Iterable[Mapping[str, Any]],
    marks: Iterable[tuple[float, Value]] = (),
    log: bool = False,
) -> Block | None:
    """A chart of lines over one axis; None if no line has a point.

    Args:
        title: above the chart.
        x: what the horizontal axis counts.
        unit: of the values.
        drawn: the lines, of `series`.
        marks: vertical lines: where, and what it is.
        log: whether both axes are logarithmic.
    """
    found = [one for one in drawn if one["x"]]
    if not found:
        return None
    return {
        "kind": "lines",
        "title": title,
        "x": x,
        "unit": unit,
        "series": found,
        "marks": [[at, what] for at, what in marks],
        "log": log,
    }


def bars(
    title: Value,
    unit: str,
    groups: Sequence[Value],
    parts: Iterable[tuple[Value, Sequence[float]]],
    stacked: bool = True,
) -> Block | None:
    """Bars, one for each group, of parts one after the other or under one another; None if all are
    nothing. A part is a name and a number for each group."""
    found = [(name, [short(v) for v in values]) for name, values in parts if any(values)]
    if not found:
        return None
    return {
        "kind": "bars",
        "title": title,
        "unit": unit,
        "groups": list(groups),
        "parts": [{"name": name, "values": values} for name, values in found],
        "stacked": stacked,
    }


def heat(
    title: Value,
    columns: tuple[Value, Sequence[Value]],
    rows: tuple[Value, Sequence[Value]],
    values: Sequence[Sequence[float]],
    unit: str,
) -> Block:
    """A table of colours. `columns` and `rows`: what they are, and the name of each."""
    return {
        "kind": "heat",
        "title": title,
        "x": columns[0],
        "columns": list(columns[1]),
        "y": rows[0],
        "rows": list(rows[1]),
        "values": [[short(v) for v in row] for row in values],
        "unit": unit,
    }


def timeline(
    title: Value,
    lanes: Sequence[Value],
    kinds: Sequence[tuple[str, Value]],
    spans: Iterable[tuple[int, int, float, float, str]],
) -> Block:
    """Who did what when. `kinds`: the letter of each kind and its name; a span is its lane, its
    kind, start and stop in seconds, and its label. Past MOST_SPANS the latest are left out."""
    found = sorted(spans, key=lambda span: span[2])
    kept = found[:MOST_SPANS]
    return {
        "kind": "timeline",
        "title": title,
        "lanes": list(lanes),
        "kinds": [list(each) for each in kinds],
        "spans": [[lane, of, short(a), short(b), label] for lane, of, a, b, label in kept],
        "left_out": len(found) - len(kept),
    }


def ranks(axes: Sequence[str], held: Iterable[Mapping[str, Any]]) -> Block:
    """A tile for each rank: `rank`, `coords` by axis, and `facts`, pairs of a name and a value."""
    return {"kind": "ranks", "axes": list(axes), "tiles": [dict(each) for each in held]}


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MOST_POINTS: of each part of the line its lowest and its highest point."""
    if len(points) <= MOST_POINTS:
        return [*points]
    parts = MOST_POINTS // 2
    found = [points[0]]
    for part in range(parts):
        some = points[part * len(points) // parts : (part + 1) * len(points) // parts]
        low, high = min(some, key=lambda p: p[1]), max(some, key=lambda p: p[1])
        found += sorted({low, high})
    return [*dict.fromkeys([*found, points[-1]])]
