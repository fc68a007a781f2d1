"""What a rank holds, by part: predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence

from .. import blocks
from ..read_run import RunRecord, as_number, numbers, tables
from ..texts import Value, number, text
from .curves import drawn

# group -> the parts of a prediction in it, as weft.planner names them
GROUPS = {
    "weights": ("weights", "gathered weights"),
    "gradients": ("gradients", "dummy gradients"),
    "state": ("optimizer", "averages", "synchroniser"),
    "activations": ("activations", "temporaries", "update", "start"),
    "process": ("process",),
}
MOST_RANKS = 32


def memory(runs: Sequence[RunRecord]) -> blocks.Section | None:
    found: list[tuple[Value, Sequence[blocks.Block]]] = [(run.name, [*_parts(run)]) for run in runs]
    over = blocks.lines(
        text("memory.over"),
        text("axis.step"),
        "bytes",
        drawn(runs, "memory_bytes", text("memory.peak")),
    )
    shown = [*found[0][1]] if len(runs) == 1 else [blocks.beside(found)]
    if not any(each for _, each in found):
        shown = []
    kept = shown + ([over] if over is not None else [])
    return blocks.section("memory", text("memory.title"), text("memory.intro"), kept)


def predicted(run: RunRecord) -> dict[str, float]:
    """Group -> predicted bytes of the rank that needs most; a part of no group counts to the
    activations."""
    groups = dict.fromkeys(GROUPS, 0.0)
    for part, nbytes in numbers(run.prediction.get("memory")).items():
        group = next((name for name, parts in GROUPS.items() if part in parts), "activations")
        groups[group] += nbytes
    return groups


def measured(rank: dict[str, object]) -> dict[str, float]:
    """Group -> bytes that a rank held: what its peak has above the other parts are activations and
    what a step needs beside them."""
    found = {
        "weights": as_number(rank.get("weights_bytes")) or 0.0,
        "gradients": as_number(rank.get("gradients_bytes")) or 0.0,
        "state": as_number(rank.get("state_bytes")) or 0.0,
        "process": as_number(rank.get("before_bytes")) or 0.0,
    }
    peak = as_number(rank.get("peak_bytes")) or 0.0
    return found | {"activations": max(0.0, peak - sum(found.values()))}


def _parts(run: RunRecord) -> list[blocks.Block]:
    expected, held = predicted(run), tables(run.ranks.get("ranks"))
    left_out = len(held) - MOST_RANKS
    columns: list[tuple[Value, dict[str, float]]] = []
    if any(expected.values()):
        columns.append((text("memory.predicted"), expected))
    columns += [
        (text("rank", rank=str(one.get("rank"))), measured(one)) for one in held[:MOST_RANKS]
    ]
    chart = blocks.bars(
        text("memory.parts"),
        "bytes",
        [name for name, _ in columns],
        [(text(f"memory.{part}"), [each[part] for _, each in columns]) for part in GROUPS],
    )
    if chart is None:
        return [blocks.note(text("memory.missing"))]
    said: list[blocks.Block] = [chart]
    if left_out > 0:
        said.append(blocks.note(text("memory.left_out", count=number(left_out))))
    if not any(expected.values()):
        why = run.prediction.get("why")
        unknown = text("memory.unpredicted")
        said.append(blocks.note(text("because", what=unknown, why=str(why)) if why else unknown))
    else:
        parts = numbers(run.prediction.get("memory"))
        rows = [
            [text(f"part.{n}") if _known(n) else n, number(v, "bytes")]
            for n, v in parts.items()
            if v
        ]
        head = [text("memory.part"), text("memory.bytes")]
        said.append(blocks.table(head, rows, text("memory.prediction")))
    return said


def _known(part: str) -> bool:
    return any(part in parts for parts in GROUPS.values())
