"""The load of experts: tokens of each beside the mean, and what found no room."""

from __future__ import annotations

from collections.abc import Sequence

from .. import blocks
from ..read_run import RunRecord, as_number
from ..texts import text
from .curves import drawn

MOST_MODULES = 64


def experts(runs: Sequence[RunRecord]) -> blocks.Section | None:
    found = [(run.name, [*filter(None, [_load(run)])]) for run in runs]
    if not any(each for _, each in found):
        return None
    shown = found[0][1] if len(runs) == 1 else [blocks.beside(found)]
    steps = text("axis.step")
    keys = {"busiest_expert": "", "dropped_share": "share", "gate_loss": ""}
    charts = [
        blocks.lines(text(f"experts.{key}"), steps, unit, drawn(runs, key, text(f"experts.{key}")))
        for key, unit in keys.items()
    ]
    kept = [*shown, *filter(None, charts)]
    return blocks.section("experts", text("experts.title"), text("experts.intro"), kept)


def totals(run: RunRecord) -> dict[str, list[float]]:
    """Module -> choices of each expert, over all logged lines."""
    found: dict[str, list[float]] = {}
    for line in run.steps:
        rows = line.get("tokens_per_expert")
        for module, row in rows.items() if isinstance(rows, dict) else ():
            if isinstance(row, list):
                counts = [as_number(n) or 0.0 for n in row]
                before = found.get(str(module), [0.0] * len(counts))
                if len(before) == len(counts):
                    found[str(module)] = [a + b for a, b in zip(before, counts, strict=True)]
    return found


def _load(run: RunRecord) -> blocks.Block | None:
    counts = dict([*totals(run).items()][:MOST_MODULES])
    if not counts:
        return None
    widest = max(map(len, counts.values()))
    values = [
        [n * len(row) / (sum(row) or 1.0) for n in row] + [0.0] * (widest - len(row))
        for row in counts.values()
    ]
    columns = (text("experts.expert"), [str(place) for place in range(widest)])
    return blocks.heat(
        text("experts.load"), columns, (text("experts.module"), [*counts]), values, ""
    )
