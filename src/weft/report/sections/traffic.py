"""Collectives by axis: bytes that a rank sends in a step, and seconds that it waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.train import ProfiledStep

from .. import blocks
from ..read_run import RunRecord, as_number, numbers, points, tables
from ..texts import Value, number, text

EXPOSED = " exposed"  # the end of the name of a predicted wait
OVER = " over "  # between the kind of a profiled communication and its axis


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
    if run.profiled is not None:
        yield from _profiled(run.profiled)


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


def _profiled(step: ProfiledStep) -> Iterable[blocks.Block]:
    """How long each axis and each kind of communication is under way, and how much of that runs
    beside computing: means of the ranks."""
    of_axis: dict[str, list[str]] = {}
    for label in dict.fromkeys(label for rank in step.ranks for label in rank.comms):
        of_axis.setdefault(label.partition(OVER)[2], []).append(label)
    if not of_axis:
        return
    times = {axis: _times(step, labels) for axis, labels in of_axis.items()}
    parts = [
        (text("traffic.beside"), [hidden for _, hidden in times.values()]),
        (text("traffic.exposed"), [took - hidden for took, hidden in times.values()]),
    ]
    number_of = number(step.number)
    chart = blocks.bars(text("traffic.profile", step=number_of), "s", [*times], parts)
    if chart is not None:
        yield chart
    rows = []
    for axis, labels in of_axis.items():
        kinds = [(label.partition(OVER)[0], [label]) for label in labels]
        rows += [[kind, axis, *_figures(step, some)] for kind, some in kinds]
        if len(kinds) > 1:
            rows.append([text("traffic.all_kinds"), axis, *_figures(step, labels)])
    keys = ("kind", "axis", "count", "under_way", "hidden_share")
    head = [text(f"traffic.{key}") for key in keys]
    yield blocks.table(head, rows, text("traffic.profile_table", step=number_of))


def _times(step: ProfiledStep, labels: Sequence[str]) -> tuple[float, float]:
    """Seconds under way, and seconds of these beside computing: means of the ranks."""
    took = [rank.comm_s(*labels) for rank in step.ranks]
    hidden = [rank.overlapped_s(*labels) for rank in step.ranks]
    return sum(took) / len(took), sum(hidden) / len(hidden)


def _figures(step: ProfiledStep, labels: Sequence[str]) -> list[Value]:
    """How often on a rank at most, seconds under way, and the share beside computing."""
    took, hidden = _times(step, labels)
    count = max(sum(len(rank.comms.get(label, ())) for label in labels) for rank in step.ranks)
    share = hidden / took if took else None
    return [number(count), number(took, "s"), number(share, "share")]
