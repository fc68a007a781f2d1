"""Where a model may be split into stages, with the cost of each part."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from .graph import ForwardGraph


@dataclass(frozen=True)
class SplitPoint:
    """From the call of `module` to the next atom's. `weights`: parameters that are first used in
    it, `parameters` their elements; `flops` and `time` (seconds, if profiled) of its forward: a
    backward takes about twice as many."""

    module: str
    weights: tuple[str, ...]
    parameters: int
    flops: float
    time: float


def split_points(chart: ForwardGraph, blocks: Collection[str] = ()) -> list[SplitPoint]:
    """The parts of a model between which a cut is sensible, in order of execution: blocks are not
    cut, what contains blocks, a Sequential, or a module with a list is. The first atom begins with
    the forward."""
    counts: dict[str, int] = {}
    for index in chart.calls():
        counts[chart.events[index].name] = counts.get(chart.events[index].name, 0) + 1
    starts = [i for i in _descend(chart, 0, set(blocks)) if counts[chart.events[i].name] == 1]
    order = {index: place for place, index in enumerate(chart.calls())}
    atoms, seen = [], set[str]()
    for place, start in enumerate(starts):
        begin, stop = (
            start if place else 0,
            starts[place + 1] if place + 1 < len(starts) else len(chart.events),
        )
        inside = [e for e in chart.events[begin:stop] if not e.call]
        weights = list(dict.fromkeys(n for e in inside for n in e.weights if n not in seen))
        seen |= set(weights)
        first, last = order[start] if place else 0, order.get(stop, -1)
        seconds = [run[last] - run[first] for run in chart.clock]
        size = sum(chart.weights[n].size for n in weights)
        spent = statistics.median(seconds) if seconds else 0.0
        name = chart.events[start].name
        atoms.append(SplitPoint(name, tuple(weights), size, sum(e.flops for e in inside), spent))
    return atoms


def _descend(chart: ForwardGraph, outer: int, blocks: set[str]) -> Iterator[int]:
    inner = [
        i for i in chart.calls() if chart.events[i].parent == outer and chart.events[i].weights
    ]
    for index in inner:
        event = chart.events[index]
        holds = any(e.call and e.name in blocks for e in chart.events[index + 1 : event.end + 1])
        only = len(inner) == 1 and not blocks
        if event.name not in blocks and (holds or event.name in chart.containers or only):
            below = list(_descend(chart, index, blocks))
            if below:
                yield from below
                continue
        yield index
