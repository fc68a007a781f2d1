"""What went wrong and what weft did: restarts, steps left out, slow ranks, replicas that left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .. import blocks
from ..read_run import RunRecord, as_number, points
from ..texts import Value, number, text
from .curves import drawn
from .outcome import clock

KNOWN = (
    "started",
    "resumed",
    "died",
    "failed",
    "rolled_back",
    "left_out",
    "warning",
    "stopped",
    "finished",
)
TONES = {"died": "bad", "failed": "bad", "finished": "good", "started": "", "resumed": "info"}
SLOW = 2.0  # times the median of ranks with the same work
MOST_EVENTS = 500


def faults(runs: Sequence[RunRecord]) -> blocks.Section | None:
    found = [(run.name, _happened(run)) for run in runs]
    shown = found[0][1] if len(runs) == 1 else [blocks.beside(found)]
    steps = text("axis.step")
    values = {
        key: [*drawn(runs, key, text(f"faults.{key}"))]
        for key in ("replicas", "skipped", "batches_left_out", "staleness", "slowest_ratio")
    }
    charts = [
        blocks.lines(text(f"faults.{key}"), steps, "", lines) for key, lines in values.items()
    ]
    kept = [*shown, *filter(None, charts)]
    return blocks.section("faults", text("faults.title"), text("faults.intro"), kept)


def _happened(run: RunRecord) -> list[blocks.Block]:
    if not run.events:
        return [blocks.note(text("faults.unrecorded"))]
    serious = [e for e in run.events if e.get("event") not in ("started", "finished")]
    shown = [] if serious else [blocks.note(text("faults.none"), "good")]
    rows: list[list[Value]] = [
        [
            clock(each),
            number(as_number(each.get("step"))),
            _name(each.get("event")),
            str(each.get("text") or ""),
        ]
        for each in run.events[:MOST_EVENTS]
    ]
    head = [text(f"faults.{key}") for key in ("time", "step", "event", "text")]
    shown.append(blocks.table(head, rows, text("faults.events")))
    slow = Counter(
        str(line.get("slowest_rank"))
        for line in run.steps
        if (as_number(line.get("slowest_ratio")) or 0.0) > SLOW
    )
    lines = len([*points(run.steps, "slowest_ratio")])
    for rank, count in slow.most_common(3):
        said = text("faults.slow", rank=rank, count=number(count), lines=number(lines))
        shown.append(blocks.note(said, "warn"))
    return shown


def _name(event: object) -> Value:
    return text(f"event.{event}") if event in KNOWN else str(event)
