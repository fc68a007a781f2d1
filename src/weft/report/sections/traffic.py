"""Collectives by axis: bytes that a rank sends in a step, and seconds that it waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .. import blocks
from ..read_run import RunRecord, as_number, numbers, points, tables
from ..texts import Value, number, text

EXPOSED = " exposed"  # the end of the name of a predicted wait


def traffic(runs: Sequence[RunRecord]) -> blocks.Section | None:
    found = [(run.name, [*_blocks(run)]) for run in runs]
    shown = found[0][1] if len(runs) == 1 else [blocks.beside(found)]
    if not any(each for _, each in found):
        shown = []
    return blocks.section("traffic", text("traffic.title"), text("traffic.intro"), shown)


def _blocks(run: RunRecord) -> Iterable[blocks.Block]:
    collectives = tables(run.ranks.get("collectives"))
    sent = _by_axis(collectives)
    expected = numbers(run.prediction.get("traffic"))
    axes = [*dict.fromkeys([*sent, *(axis for axis, nbytes in expected.items() if nbytes >= 1)])]
    parts = [
        (text("traffic.predicted"), [expected.get(axis, 0.0) for axis in axes]),
        (text("traffic.measured"), [sent.get(axis, 0.0) for axis in axes]),
    ]
    chart = blocks.bars(text("traffic.bytes"), "bytes", axes, parts, stacked=False)
    if chart is not None:
        yield chart
    waits = _waits(run)
    if waits is not None:
        yield waits
    if collectives:
        rows = [
            [
                str(one.get("kind")),
                str(one.get("axis")),
                number(as_number(one.get("count"))),
                number(as_number(one.get("bytes")), "bytes"),
                number(as_number(one.get("sent_bytes")), "bytes"),
            ]
            for one in collectives
        ]
        keys = ("kind", "axis", "count", "message_bytes", "sent")
        head = [text(f"traffic.{key}") for key in keys]
        yield blocks.table(head, rows, text("traffic.first_step"))
    if run.comm_s:
        yield from _profiled(run)


def _by_axis(collectives: Iterable[dict[str, object]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in collectives:
        axis = str(one.get("axis"))
        found[axis] = found.get(axis, 0.0) + (as_number(one.get("sent_bytes")) or 0.0)
    return found


def _mean(run: RunRecord, key: str) -> float:
    values = [value for _, value in points(run.steps, key)]
    values = values[1:] or values  # the first line's steps set up
    return sum(values) / len(values) if values else 0.0


def _waits(run: RunRecord) -> blocks.Block | None:
    """Seconds of a step that a rank waits, by what for; and those that the planner expects."""
    expected = {
        name.removesuffix(EXPOSED): seconds
        for name, seconds in numbers(run.prediction.get("time")).items()
        if name.endswith(EXPOSED) and seconds > 0
    }
    if bubble := numbers(run.prediction.get("time")).get("bubble"):
        expected["bubble"] = bubble
    stage_s = [as_number(one.get("stage_wait_s")) or 0.0 for one in tables(run.ranks.get("ranks"))]
    measured: list[tuple[Value, float, float]] = [
        (text("wait.gradients"), _mean(run, "sync_exposed_s"), _mean(run, "sync_hidden_s")),
        (text("wait.experts"), _mean(run, "dispatch_exposed_s"), _mean(run, "dispatch_hidden_s")),
        (text("wait.stages"), sum(stage_s) / len(stage_s) if stage_s else 0.0, 0.0),
        (text("wait.data"), _mean(run, "data_wait_s"), 0.0),
    ]
    kept = [one for one in measured if one[1] or one[2]]
    groups = [name for name, _, _ in kept]
    groups += [text("wait.predicted", what=name) for name in expected]
    nothing = [0.0] * len(expected)
    parts = [
        (text("traffic.waited"), [waited for _, waited, _ in kept] + nothing),
        (text("traffic.hidden"), [hidden for _, _, hidden in kept] + nothing),
        (text("traffic.expected"), [0.0] * len(kept) + [*expected.values()]),
    ]
    return blocks.bars(text("traffic.seconds"), "s", groups, parts)


def _profiled(run: RunRecord) -> Iterable[blocks.Block]:
    """Seconds under way in the profiled steps: the mean and the most of ranks."""
    names = [f"{kind} {axis}" for kind, axis in run.comm_s]
    means = [sum(of.values()) / len(of) for of in run.comm_s.values()]
    most = [max(of.values()) for of in run.comm_s.values()]
    parts = [(text("traffic.mean"), means), (text("traffic.most"), most)]
    chart = blocks.bars(text("traffic.profile"), "s", names, parts, stacked=False)
    if chart is not None:
        yield chart
