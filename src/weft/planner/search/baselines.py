"""The layouts that come to mind first, each as a pattern, and why it is not the best."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from weft.core import Layout

from ..cost.breakdown import waits_for
from ..cost.layer_correction import MEASURED
from ..cost.layout_batch import AXES
from .candidates import find_candidates, join_candidates, refusal, with_schedules
from .explain import excess_text
from .layout_pattern import LayoutPattern
from .query import PlanQuery
from .ranking import TIE, RankedLayout, priced_best, simulate_rows

SAID = {"matmul": "matmuls", "memory": "elementwise work"}  # in other words than an estimate's
COMPUTING = "computing"
COMPUTE = ("matmuls", "attention", "elementwise work", MEASURED)
NEAR = 1 + TIE  # times as long is no loss to speak of


@dataclass(frozen=True)
class Baseline:
    """`pattern`: what it is; `row`: its best choice, if there is one; `why` it is not the best
    layout."""

    name: str
    pattern: str
    row: RankedLayout | None
    why: str


def baseline_patterns(question: PlanQuery, devices: int) -> Iterator[tuple[str, str]]:
    """Names and patterns, on so many devices."""
    node, work = min(question.cluster.hardware.node, devices), question.work
    nodes = devices // node if devices % node == 0 else 1
    heads = any(block.heads for block in work.blocks)
    if devices == 1:
        return
    several = any(
        devices % size == 0 for size in range(2, math.isqrt(devices) + 1)
    )  # two axes have room
    yield "data parallel", f"dp{devices}"
    yield "fully sharded", f"fsdp{devices}"
    if nodes > 1:
        yield "sharded in a node, copied across", f"dp{nodes}.fsdp{node}"
    if heads and node > 1:
        yield "tensor parallel in a node", f"dp*.tp{node}" if nodes > 1 else f"tp{node}"
    if heads and nodes > 1:
        yield (
            "tensor parallel over two nodes",
            f"dp*.tp{2 * node}" if nodes > 2 else f"tp{2 * node}",
        )
    if work.depth > 1 and several:
        yield "pipeline and data parallel", "pp*.dp*"
        if heads and nodes > 3:
            yield "3D, as Megatron has it", f"pp*.dp*.tp{node}"
    if any(block.experts for block in work.blocks):
        if nodes > 1:
            yield "experts in a node", f"dp*.ep{node}"
        yield "experts on all", f"ep{devices}"


def baselines(
    question: PlanQuery, devices: int, best: RankedLayout, ranked: Sequence[RankedLayout] = ()
) -> list[Baseline]:
    """Each that is not the best layout itself. One that is among the `ranked` is what it is there,
    unless faster."""
    known: dict[str, RankedLayout] = {}
    for row in ranked:
        known.setdefault(row.layout, row)
    found = []
    for name, text in baseline_patterns(question, devices):
        first = _best(question, devices, LayoutPattern.parse(text))
        if first is None:
            found.append(Baseline(name, text, None, _no_baseline_reason(question, devices, text)))
        elif first.layout != best.layout:
            least = min(
                (first, known.get(first.layout, first)), key=lambda row: (not row.fits, row.step_s)
            )
            found.append(Baseline(name, text, least, why_slower(question, least, best)))
    return found


def _best(question: PlanQuery, devices: int, pattern: LayoutPattern) -> RankedLayout | None:
    """The best choice of a pattern, conventions ignored."""
    found = find_candidates(question, devices, pattern, exhaustive=True)
    named = [found.choices.sizes[axis] > 1 for axis, _ in pattern.sizes]
    found = found.take(np.all(named, axis=0))
    if len(found):
        found = join_candidates([found, with_schedules(found, question, pattern, exhaustive=True)])
    first = priced_best(question, found)
    return None if first is None else simulate_rows(question, [first])[0]


def _no_baseline_reason(question: PlanQuery, devices: int, text: str) -> str:
    """Why the rules allow nothing of a pattern: by the sizes that it gives."""
    row = {axis: int(size) for axis, size in LayoutPattern.parse(text).sizes if size}
    sizes = dict.fromkeys(AXES, 1) | row
    return refusal(sizes, question) or f"no sizes that the rules allow make {devices:,} ranks"


def why_slower(question: PlanQuery, row: RankedLayout, best: RankedLayout) -> str:
    """Why a choice is not as good as the best."""
    if not row.fits:
        return excess_text(row)
    times = row.step_s / best.step_s
    if times < 1 / NEAR:
        return (
            f"{1 / times - 1:.0%} faster in microbatches of {row.microbatch}, but left out of this"
            " search"
        )
    if times < NEAR:
        more = len(Layout.parse(row.layout).axes) > len(Layout.parse(best.layout).axes)
        return "as fast, with more axes" if more else "as fast"
    mine, its = seconds_by_cause(best), seconds_by_cause(row)
    part = max(its, key=lambda name: its[name] - mine.get(name, 0.0))
    slower = f"{times:.2g} x slower" if times >= 1.1 else f"{times - 1:.0%} slower"
    if part == COMPUTING:  # matrices are smaller, or a stage has more of them
        return f"{slower}: computes {its[part] / mine[part]:.3g} x as long"
    nodes = ", over nodes" if _crosses(question, row, part) else ""
    return f"{slower}: {_share_text(part, its[part] / row.step_s)}{nodes}"


def seconds_by_cause(row: RankedLayout) -> dict[str, float]:
    """What takes how many seconds of a step, all that is computed as one."""
    found = {COMPUTING: 0.0}
    for name, share in shares(row).items():
        name = COMPUTING if name in COMPUTE else name
        found[name] = found.get(name, 0.0) + share * row.step_s
    return found


def shares(row: RankedLayout) -> dict[str, float]:
    """What takes of a row's time how much: exchanges by their axis."""
    found: dict[str, float] = {}
    for part, value in row.time.items():
        name = waits_for(part) or SAID.get(part, part)
        found[name] = found.get(name, 0.0) + value / row.step_s
    return found


def limits(row: RankedLayout) -> str:
    """The largest part of a row's time that is not compute."""
    rest = {name: share for name, share in shares(row).items() if name not in COMPUTE}
    part = max(rest, key=lambda name: rest[name])
    return _share_text(part, rest[part]) if rest[part] >= 0.01 else "compute"


def _share_text(part: str, share: float) -> str:
    return f"{part} {share:.0%}"


def _crosses(question: PlanQuery, row: RankedLayout, axis: str) -> bool:
    """Whether the exchanges of an axis leave a node."""
    layout, node = Layout.parse(row.layout), question.cluster.hardware.node
    if axis not in layout.axes:
        return False
    inner = layout.sizes[layout.axes.index(axis) :]
    return math.prod(size for _, size in inner) > node
