"""The collectives of gradients and sharded weights that a plan implies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from math import prod

import torch

from weft.core import (
    COPY,
    REPLICA_AXIS,
    GradBucket,
    Param,
    Plan,
    Weight,
    bucket_gradients,
    fsdp_rows,
    is_inside,
    numel_of,
    stored_numel,
    stored_segments,
    whole_updates,
)

from .axes import TOKEN_AXES
from .comm_queries import BoundaryShape, CallSizes, Collective
from .wire_sizes import request_traffic


def update_comms(plan: Plan, rank: int) -> Iterator[Collective]:
    """What an asynchronous schedule reduces: the gradients of every update, the weight of every
    microbatch's loss."""
    if not plan.schedule.versions:
        return
    table, data = plan.params(), ".".join(plan.layout.active_axes(*TOKEN_AXES))
    for action in plan.schedule.order[plan.layout.stage_of(rank)]:
        if action.kind == "F" and action.stage == plan.schedule.stages - 1 and data:
            yield Collective("all_reduce", data, 8, "forward", "(loss)")
        together: Counter[tuple[tuple[str, ...], torch.dtype]] = Counter()
        used = plan.staging.stages[action.stage].weights if plan.staging is not None else ()
        for weight in plan.weights if action.kind == "U" else ():
            partial = plan.reduced_over(weight.name, table)
            axes = plan.layout.active_axes(*partial) if partial else ()
            if axes and weight.trainable and weight.name in used:
                count = prod(plan.local_shape(weight, table, plan.layout.coords(rank)))
                together[axes, weight.dtype] += count + 1  # whether there is a gradient
        for (axes, dtype), count in together.items():
            nbytes = count * dtype.itemsize
            yield Collective(
                "all_reduce", ".".join(axes), nbytes, "reduce", f"stage {action.stage}"
            )


def whole_update_comms(plan: Plan, rank: int, whole: Collection[str]) -> Iterator[Collective]:
    """Weights and gradients that go to the ranks that update them whole, and new weights that come
    back. `whole`: these parameters."""
    weights, table = {w.name: w for w in plan.weights}, plan.params()
    order = plan.schedule.order[plan.layout.stage_of(rank)]
    times = sum(action.kind == "U" for action in order) if plan.schedule.versions else 1
    for update in whole_updates(plan, whole):
        axes, item = ".".join(update.axes), update.dtype.itemsize
        here = plan.layout.index(rank, *update.axes)
        peers = plan.layout.group_ranks(rank, *update.axes)
        owned = [name for name, owner in update.owners.items() if owner == here]
        held = {
            (name, peer): stored_numel(
                stored_segments(plan, weights[name].shape, table[name], peer)
            )
            for name in update.owners
            for peer in peers
        }
        there = sum(2 * held[name, peer] + 1 for name in owned for peer in peers)
        back = sum(held[name, rank] for name in update.owners)
        for nbytes in (there * item, back * item) * times:
            yield Collective("all_to_all", axes, nbytes, "step", "")


def replica_comms(plan: Plan, bucket: GradBucket, rank: int) -> Iterator[Collective]:
    """What a replica's synchroniser sends for a bucket of gradients."""
    sync, table = plan.gradient_sync, plan.params()
    assert sync is not None
    size, here = plan.layout.replica_count, plan.layout.replica_of(rank)
    weights = {w.name: w for w in plan.weights}
    shapes = [_stored_shape(plan, weights[name], table, rank) for name in bucket.names]
    master = weights[bucket.names[0]].dtype
    itemsize = plan.dtypes.reduced(master).itemsize
    peers = sync.replica_view(size, here)
    for asked in sync.codec.asks(shapes, peers, itemsize) if numel_of(shapes) else ():
        for kind, nbytes in request_traffic(sync.route, sync.local, asked, peers, bucket.owner):
            yield Collective(kind, REPLICA_AXIS, nbytes, "reduce", bucket.names[0])
    if sync.route == "owners" and here == bucket.owner:
        for _ in range(size - 1):
            nbytes = numel_of(shapes) * master.itemsize
            yield Collective("send", REPLICA_AXIS, nbytes, "step", bucket.names[0])


def chosen_weights(plan: Plan) -> tuple[str, ...]:
    """Trainable weights of FSDP2's units that hold a weight whose module runs only where data say
    so: there ranks reduce zeros for what they did not reach."""
    trainable = {w.name for w in plan.weights if w.trainable}
    chosen = tuple(f"{name}." for name in plan.chosen)
    return tuple(
        param.name
        for step in plan.steps
        if step.gather is not None and any(p.name.startswith(chosen) for p in step.params)
        for param in step.params
        if param.name in trainable
    )


def gather_comms(
    plan: Plan,
    coords: Mapping[str, int],
    crossings: Mapping[str, BoundaryShape],
    unreached: Collection[str],
    calls: Mapping[str, CallSizes] | None = None,
) -> Iterator[Collective]:
    table = plan.params()
    used = _gathered_in_backward(plan, crossings, unreached, calls)
    weights, rule = {w.name: w for w in plan.weights}, plan.dtypes
    zeros = set(chosen_weights(plan))
    for step in plan.steps:
        gather = step.gather
        if gather is None or not step.params:
            continue
        size = plan.layout.size(gather.axis)
        padded = {}
        for param in step.params:
            first, *rest = plan.local_shape(weights[param.name], table, coords)
            padded[param.name] = -(-first // size) * size * prod(rest)
        gathered = sum(
            n * rule.computed(weights[name].dtype).itemsize for name, n in padded.items()
        )
        reduced = sum(
            n * rule.reduced(weights[name].dtype).itemsize
            for name, n in padded.items()
            if weights[name].trainable and (name not in unreached or name in zeros)
        )
        kept = calls[step.module].kept if calls and step.module in calls else None
        several = plan.staging is None and kept is None and _count(step.module, calls) > 1
        # FSDP2 frees a unit that was whole after the backward of one of several calls
        further = calls[step.module].regathered if several and calls is not None else 0
        uses = {
            "step": 1 + further,  # in the last microbatch
            "microbatch": plan.accumulate * (1 + further),
            "use": plan.accumulate * _count(step.module, calls) * (1 + plan.runs_forward_twice)
            + used.get(step.module, 0),
        }
        # stages of a pipeline stay whole until the step ends
        passes = 1 if kept is not None and plan.staging is not None else plan.accumulate
        if kept is not None:
            uses["use"] = passes * kept
        for _ in range(uses[gather.gathered]):
            yield Collective("all_gather", gather.axis, gathered, "gather", step.module)
        # FSDP2 reduces what earlier microbatches left after the backward of the last call
        once = 2 if several and plan.accumulate > 1 else 1
        for _ in range(passes if gather.reduced == "microbatch" else once):
            if reduced and not plan.fsdp_uses_codec:
                yield Collective("reduce_scatter", gather.axis, reduced, "reduce", step.module)
            elif reduced and (sync := plan.gradient_sync):
                item = next(rule.reduced(weights[name].dtype).itemsize for name in padded)
                peers = sync.replica_view(size)
                for asked in sync.codec.scatter_asks(reduced // item // size, peers, item):
                    for kind, nbytes in request_traffic("backend", 1, asked, peers, 0):
                        yield Collective(kind, gather.axis, nbytes, "reduce", step.module)
        if reduced and plan.layout.replica_count > 1 and not plan.uses_custom_dp_sync:
            yield Collective("all_reduce", REPLICA_AXIS, reduced // size, "reduce", step.module)


def _count(module: str, calls: Mapping[str, CallSizes] | None) -> int:
    """How often a unit is called; the root always is."""
    if calls is None or not module:
        return 1
    return calls[module].count if module in calls else 0


def _gathered_in_backward(
    plan: Plan,
    crossings: Mapping[str, BoundaryShape],
    unreached: Collection[str],
    calls: Mapping[str, CallSizes] | None,
) -> dict[str, int]:
    """Unit -> how often the backwards of a step gather it. Nothing goes back through what is
    frozen, if all before it is; but FSDP2 gathers the unit before one that it comes to."""
    learning = {w.name for w in plan.weights if w.trainable} - set(unreached)
    stages: dict[
        int, list[tuple[str, bool, bool]]
    ] = {}  # of each unit: whether it learns, and what is before it
    for step in plan.steps:
        called = _count(step.module, calls)
        if step.gather is not None and step.gather.gathered == "use" and step.params and called:
            crossing = crossings.get(step.module)
            below = crossing is None or crossing.needs_grad
            learns = any(param.name in learning for param in step.params)
            stages.setdefault(plan.users(step.params[0].name)[0], []).append(
                (step.module, learns, below)
            )
    found: Counter[str] = Counter()
    for stage, units in stages.items():
        for microbatch in range(plan.accumulate):
            split = plan.backwards(stage, microbatch) == 2
            comes = [below if split else learns or below for _, learns, below in units]
            for i, (name, learns, _) in enumerate(units):
                count = _count(name, calls)
                if calls is not None and count and (count > 1 or plan.staging is None):
                    found[name] += calls[name].regathered  # their order is known
                else:
                    found[name] += (comes[i] or any(comes[i + 1 : i + 2])) * count
                found[name] += split and learns
    return found


def bucket_bytes(plan: Plan, names: tuple[str, ...], rank: int) -> int:
    table = plan.params()
    held = [weight for weight in plan.weights if weight.name in names]
    return sum(
        prod(_stored_shape(plan, weight, table, rank)) * plan.dtypes.reduced(weight.dtype).itemsize
        for weight in held
    )


def _stored_shape(
    plan: Plan, weight: Weight, table: Mapping[str, Mapping[str, Param]], rank: int
) -> tuple[int, ...]:
    """Of what a rank keeps of a parameter."""
    coords = plan.layout.coords(rank)
    shape = list(plan.local_shape(weight, table, coords))
    for axis, param in table[weight.name].items():
        if param.stored != param.compute and param.stored != COPY:
            start, stop = fsdp_rows(shape[0], plan.layout.size(axis), plan.layout.index(rank, axis))
            shape[0] = stop - start
    return tuple(shape)


def in_a_bucket(whole: Plan, names: Collection[str]) -> bool:
    """Whether some rank sums the gradient of one of these parameters with others."""
    buckets = (b for rank in range(whole.layout.world) for b in bucket_gradients(whole.of(rank)))
    return any(name in names for bucket in buckets for name in bucket.names)


def read_alone(whole: Plan) -> set[str]:
    """Parameters that the stages of some rank read and give no gradient: as an average of the
    weights does that a forward keeps."""
    items = whole.staging.items if whole.staging is not None else ()
    found, ranks = set[str](), range(whole.layout.world)
    if not any(node.weights for node in items):
        return found
    for stages in {tuple(whole.stages(rank)) for rank in ranks}:
        mine = [node for node in items if node.stage in stages]
        given = {name for node in mine if any(node.differentiable) for name in node.weights}
        read = {name for node in mine for name in node.weights} - given
        calls = {node.name for node in mine if node.call}
        for weight in whole.weights:
            names = (weight.name, *weight.aliases)
            called = any(is_inside(name, call) for name in names for call in calls)
            if weight.trainable and weight.name in read and not called:
                found.add(weight.name)
    return found
