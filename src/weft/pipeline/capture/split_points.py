"""Where a model may be split into stages, with the cost of each part."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from .graph import ForwardGraph


@dataclass(frozen=True)
class SplitPoint:
    """The part of a forward from the call of `module` to the next part. `weights`: parameters first
    used in it; `parameters`: their number of elements. `flops` and `time` (seconds, if profiled)
    are those of its forward; a backward takes about twice as much."""

    module: str
    weights: tuple[str, ...]
    parameters: int
    flops: float
    time: float


def split_points(
    graph: ForwardGraph, blocks: Collection[str] = (), units: Collection[tuple[str, ...]] = ()
) -> list[SplitPoint]:
    """The parts of a model between which a split is sensible, in order of execution. Blocks and
    units, of a module or of several that run one after another, are not divided; modules that
    contain blocks, Sequentials and modules with a list are. The first part begins with the forward.
    One begins with a module that is called several times, as the head of two views, if it uses no
    weight of those before."""
    counts, earliest = Counter[str](), dict[str, int]()
    for index in graph.calls():
        counts[graph.events[index].name] += 1
        earliest.setdefault(graph.events[index].name, index)
    repeated = {n for n, place in earliest.items() if counts[n] > 1 and graph.parts_weights(place)}
    whole = {unit[0] for unit in units if len(unit) == 1}
    found = _descend(graph, 0, set(blocks), whole | repeated)
    within = {
        index
        for unit in units
        if (places := [earliest[name] for name in unit if name in earliest])
        for index in range(min(places) + 1, max(places) + 1)
    }
    once = {name for name, number in counts.items() if number == 1}
    starts = [
        i
        for i in found
        if graph.events[i].name in once | repeated
        and earliest[graph.events[i].name] == i
        and i not in within
    ]
    order = {index: place for place, index in enumerate(graph.calls())}
    atoms, seen = [], set[str]()
    for place, start in enumerate(starts):
        begin, stop = (
            start if place else 0,
            starts[place + 1] if place + 1 < len(starts) else len(graph.events),
        )
        inside = [e for e in graph.events[begin:stop] if not e.call]
        weights = list(dict.fromkeys(n for e in inside for n in e.weights if n not in seen))
        seen |= set(weights)
        first, last = order[start] if place else 0, order.get(stop, -1)
        seconds = [run[last] - run[first] for run in graph.clock]
        size = sum(graph.weights[n].size for n in weights)
        spent = statistics.median(seconds) if seconds else 0.0
        name = graph.events[start].name
        atoms.append(SplitPoint(name, tuple(weights), size, sum(e.flops for e in inside), spent))
    return atoms


def _descend(graph: ForwardGraph, outer: int, blocks: set[str], units: set[str]) -> Iterator[int]:
    inner = [
        i for i in graph.calls() if graph.events[i].parent == outer and graph.events[i].weights
    ]
    for index in inner:
        event = graph.events[index]
        holds = any(e.call and e.name in blocks for e in graph.events[index + 1 : event.end + 1])
        only = len(inner) == 1 and not blocks
        if event.name not in blocks | units and (holds or event.name in graph.containers or only):
            below = list(_descend(graph, index, blocks, units))
            if below:
                yield from below
                continue
        yield index
