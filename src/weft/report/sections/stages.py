"""The timeline of a pipeline: predicted over measured."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core import STAGE_AXIS, Layout, WeftError
from weft.pipeline import Timeline

from .. import blocks
from ..read_run import RunRecord
from ..texts import Value, number, text
from .outcome import layout_text

KINDS = ("F", "B", "W", "U")


def stages(runs: Sequence[RunRecord]) -> blocks.Section | None:
    found = [(run.name, _drawn(run)) for run in runs]
    shown = found[0][1] if len(runs) == 1 else [blocks.beside(found)]
    if not any(each for _, each in found):
        shown = []
    return blocks.section("stages", text("stages.title"), text("stages.intro"), shown)


def _drawn(run: RunRecord) -> list[blocks.Block]:
    if run.trace:
        names = {"predicted", "measured"}
        return timeline_blocks(
            [(text(f"stages.{n}") if n in names else n, t) for n, t in run.trace]
        )
    try:
        staged = Layout.parse(layout_text(run)).size(STAGE_AXIS) > 1
    except WeftError:
        staged = False
    return [blocks.note(text("stages.untraced"))] if staged else []


def timeline_blocks(timelines: Sequence[tuple[Value, Timeline]]) -> list[blocks.Block]:
    """One chart of all timelines on one axis, and their figures."""
    occur = {of for _, one in timelines for lane in one.lanes for of in lane.seconds}
    kinds = [of for of in KINDS if of in occur] + sorted(occur - {*KINDS})
    place = {of: row for row, of in enumerate(kinds)}
    lanes: list[Value] = []
    spans = []
    for name, one in timelines:
        for rank, lane in enumerate(one.lanes):
            for label, start, stop in lane.spans:
                of = label if isinstance(label, str) else label.kind
                spans.append((len(lanes), place[of], start, stop, str(label)))
            lanes.append(text("stages.lane", name=name, rank=str(rank)))
    figures = [
        [
            name,
            number(one.makespan_s, "s"),
            number(one.ideal_s, "s"),
            number(one.bubble_s, "s"),
            number(one.bubble_fraction, "share"),
        ]
        for name, one in timelines
    ]
    head = [None, *(text(f"stages.{key}") for key in ("makespan", "ideal", "bubble", "share"))]
    shown = [(of, text(f"kind.{of}") if of in KNOWN else of) for of in kinds]
    return [
        blocks.timeline(text("stages.title"), lanes, shown, spans),
        blocks.table(head, figures),
    ]


KNOWN = (*KINDS, "recv-wait", "send", "reduce", "gather", "optimizer", "fixed")
