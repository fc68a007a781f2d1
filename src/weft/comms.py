"""The collectives that a plan implies: every one of an optimizer step, in kind, axis and bytes.

`nbytes` is the message as the collective sees it: the tensor of an all-reduce or broadcast, what an all-gather gives,
what a reduce-scatter takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from torch.distributed.tensor import Shard

from .layout import DATA_AXES
from .losses import reduced_numels
from .plans import COPY, Plan, Step, collective
from .shards import fsdp_rows

STATISTICS_BYTES = 6 * 8  # squared norm, loss, weight, unreached parameters, trail and its square, in float64


@dataclass(frozen=True)
class Comm:
    """One collective on one rank. `axis`: the axes of its group, joined by a dot."""

    kind: str
    axis: str
    nbytes: int
    when: str  # forward, backward, recompute, reduce, gather, step
    module: str


@dataclass(frozen=True)
class Crossing:
    """What crosses a module on one device, per sample: shapes without dim 0 where that is the batch."""

    entered: tuple[int, ...] | None  # first floating-point tensor that enters
    left: tuple[int, ...] | None
    needs_grad: bool  # whether what enters needs a gradient
    batched: bool = True  # dim 0 counts samples


def predict(
    plan: Plan,
    crossings: Mapping[str, Crossing],
    itemsize: int,
    unreached: Collection[str] = (),
    buffers: Iterable[int] = (),
    rank: int = 0,
) -> list[Comm]:
    """The collectives of one optimizer step on `rank`.

    `itemsize`: bytes of an element of activations and of gradients. `unreached`: parameters that get no gradient.
    `buffers`: bytes of each buffer that is broadcast at the start of a step.
    """
    comms: list[Comm] = []
    for _ in range(plan.accumulate):
        for step in plan.steps:
            comms += _boundaries(plan, step, crossings, itemsize)
        for name in plan.batchnorms:
            comms += _statistics(plan, name, crossings, itemsize)
    comms += _gathers(plan, plan.layout.coords(rank).get("tp", 0), unreached)
    for axes, names in plan.buckets():
        comms.append(Comm("all_reduce", ".".join(axes), _bucket_bytes(plan, names, rank), "reduce", names[0]))
        if unreached:
            comms.append(Comm("all_reduce", ".".join(axes), 4 * len(names), "reduce", names[0]))
    data = plan.layout.live(*DATA_AXES)
    if data:
        comms += [Comm("broadcast", ".".join(data), nbytes, "step", "") for nbytes in buffers]
    if plan.layout.live():
        comms.append(Comm("all_reduce", ".".join(plan.layout.live()), STATISTICS_BYTES, "step", ""))
    return comms


def totals(comms: Iterable[Comm]) -> dict[tuple[str, str], tuple[int, int]]:
    """(kind, axis) -> (count, bytes)."""
    counts: Counter[tuple[str, str]] = Counter()
    nbytes: Counter[tuple[str, str]] = Counter()
    for comm in comms:
        counts[comm.kind, comm.axis] += 1
        nbytes[comm.kind, comm.axis] += comm.nbytes
    return {key: (counts[key], nbytes[key]) for key in sorted(counts)}


def _boundaries(plan: Plan, step: Step, crossings: Mapping[str, Crossing], itemsize: int) -> Iterator[Comm]:
    crossing = crossings.get(step.module)
    if crossing is None:  # not reached by the forward
        return
    again = any(step.module.startswith(block + ".") for block in plan.recomputed())
    for boundary, shape, entry in ((step.input, crossing.entered, True), (step.output, crossing.left, False)):
        if boundary is None or shape is None:
            continue
        rows = plan.microbatch if crossing.batched else 1
        for axis, forward, backward in boundary.moves(entry):
            size = plan.layout.size(axis)
            if size == 1:
                continue
            whole = list(shape)
            if boundary.inside.get(axis) == Shard(-1):
                whole[-1] = -(-whole[-1] // size) * size  # an uneven vocabulary travels padded
            nbytes = rows * prod(whole) * itemsize
            for move, when in ((forward, "forward"), (backward, "backward")):
                kind = collective(*move)
                if kind is None or (when == "backward" and entry and not crossing.needs_grad):
                    continue
                yield Comm(kind, axis, nbytes, when, step.module)
                if again and when == "forward":
                    yield Comm(kind, axis, nbytes, "recompute", step.module)
            if boundary.typed:
                for count in reduced_numels(rows * prod(shape[:-1])):
                    yield Comm("all_reduce", axis, count * max(4, itemsize), "forward", "(loss)")


def _statistics(plan: Plan, name: str, crossings: Mapping[str, Crossing], itemsize: int) -> Iterator[Comm]:
    crossing = crossings.get(name)
    if crossing is None or crossing.entered is None:
        return
    axis = ".".join(plan.layout.live(*DATA_AXES))
    nbytes = crossing.entered[0] * max(4, itemsize)
    again = any(name.startswith(block + ".") for block in plan.recomputed())
    for when in ("forward", "forward", "backward", "backward", *(("recompute", "recompute") if again else ())):
        yield Comm("all_reduce", axis, nbytes, when, name)


def _gathers(plan: Plan, tp_index: int, unreached: Collection[str]) -> Iterator[Comm]:
    table = plan.params()
    weights = {w.name: w for w in plan.weights}
    for step in plan.steps:
        gather = step.gather
        if gather is None or not step.params:
            continue
        size = plan.layout.size(gather.axis)
        padded = {}
        for param in step.params:
            first, *rest = plan.local_shape(weights[param.name], table, tp_index)
            padded[param.name] = -(-first // size) * size * prod(rest)
        gathered = sum(n * weights[name].dtype.itemsize for name, n in padded.items())
        reduced = sum(
            n * weights[name].dtype.itemsize
            for name, n in padded.items() if weights[name].trainable and name not in unreached
        )  # fmt: skip
        uses = {"step": 1, "microbatch": plan.accumulate, "use": 2 * plan.accumulate}[gather.gathered]
        for _ in range(uses):
            yield Comm("all_gather", gather.axis, gathered, "gather", step.module)
        for _ in range(plan.accumulate if gather.reduced == "microbatch" else 1):
            if reduced:
                yield Comm("reduce_scatter", gather.axis, reduced, "reduce", step.module)
        if reduced and plan.layout.live("dp"):
            yield Comm("all_reduce", "dp", reduced // size, "reduce", step.module)


def _bucket_bytes(plan: Plan, names: tuple[str, ...], rank: int) -> int:
    table = plan.params()
    coords = plan.layout.coords(rank)
    total = 0
    for weight in plan.weights:
        if weight.name not in names:
            continue
        shape = list(plan.local_shape(weight, table, coords.get("tp", 0)))
        for axis, param in table[weight.name].items():
            if param.stored != param.compute and param.stored != COPY:
                start, stop = fsdp_rows(shape[0], plan.layout.size(axis), coords[axis])
                shape[0] = stop - start
        total += prod(shape) * weight.dtype.itemsize
    return total
