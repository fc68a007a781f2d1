"""Which rank holds what: a tile for each rank, and the share of each part of the model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from weft.core import ConfigError, Layout, LayoutError

from .. import blocks
from ..read_run import RunRecord, as_number, tables
from ..texts import Value, number, text
from .outcome import layout_text

MOST_RANKS = 64  # drawn one by one
MOST_PARTS = 40  # of a model, drawn one by one: else its blocks together


def layout(runs: Sequence[RunRecord]) -> blocks.Section | None:
    found = [(run.name, _drawn(run)) for run in runs]
    shown = found[0][1] if len(runs) == 1 else [blocks.beside(found)]
    if not any(each for _, each in found):
        shown = []
    return blocks.section("layout", text("layout.title"), text("layout.intro"), shown)


def _drawn(run: RunRecord) -> list[blocks.Block]:
    try:
        axes = Layout.parse(layout_text(run))
    except (LayoutError, ConfigError):
        return []
    held = {str(one.get("rank")): one for one in tables(run.ranks.get("ranks"))}
    tiles = [
        {
            "rank": rank,
            "coords": [[axis, at] for axis, at in axes.coords(rank).items()],
            "facts": _facts(held.get(str(rank), {})),
        }
        for rank in range(min(axes.world, MOST_RANKS))
    ]
    shown = [blocks.ranks(axes.axes, tiles)]
    if axes.world > MOST_RANKS:
        left = number(axes.world - MOST_RANKS)
        shown.append(blocks.note(text("layout.left_out", count=left)))
    shares = _shares(run)
    return [*shown, *([shares] if shares else [])]


def _facts(rank: dict[str, Any]) -> list[tuple[Value, Value]]:
    stages, host = rank.get("stages"), rank.get("host")
    found: list[tuple[Value, Value]] = []
    if isinstance(stages, list) and stages:
        found.append((text("layout.stage"), ", ".join(map(str, stages))))
    if (count := as_number(rank.get("parameters"))) is not None:
        found.append((text("layout.parameters"), number(count, "count")))
    if (peak := as_number(rank.get("peak_bytes"))) is not None:
        found.append((text("layout.peak"), number(peak, "bytes")))
    return [*found, *([(text("layout.host"), str(host))] if host else [])]


def _shares(run: RunRecord) -> blocks.Block | None:
    """The share of each part of the model that each rank holds."""
    holdings = tables(run.ranks.get("holdings"))
    wholes = run.ranks.get("parts")
    held = tables(run.ranks.get("ranks"))[:MOST_RANKS]
    if not holdings or not isinstance(wholes, dict) or not held:
        return None
    groups: dict[str, list[str]] = {}
    for part in wholes:
        few = len(wholes) <= MOST_PARTS
        groups.setdefault(part if few else re.sub(r"\d+", "*", part), []).append(part)
    values = []
    for parts in groups.values():
        whole = sum(as_number(wholes[part]) or 0.0 for part in parts)
        row = []
        for rank in held:
            place = rank.get("holding")
            own = holdings[place] if isinstance(place, int) and place < len(holdings) else {}
            count = sum(as_number(own.get(part)) or 0.0 for part in parts)
            row.append(min(1.0, count / whole) if whole else 0.0)
        values.append(row)
    columns = [text("rank", rank=str(one.get("rank"))) for one in held]
    return blocks.heat(
        text("layout.shares"),
        (text("layout.ranks"), columns),
        (text("layout.parts"), [*groups]),
        values,
        "share",
    )
