"""Which gradients are all-reduced together, over which axes, and when (Li et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from .layout import STAGE_AXIS
from .plan import Plan
from .step import COPY
from .sync import BUCKET_BYTES, bucket_owners


@dataclass(frozen=True)
class GradBucket:
    """One all-reduce of gradients: of these parameters, over these axes.

    `among`: the positions on `pp` that take part, where that axis is among `axes` (stages that
    share a weight). `stage`: the one whose last backward fills it; None where it is filled when all
    backwards are done. `owner`: the replica that a synchroniser with owners sums it on.
    """

    axes: tuple[str, ...]
    names: tuple[str, ...]
    among: tuple[int, ...] = ()
    stage: int | None = 0
    owner: int = 0


def bucket_gradients(plan: Plan) -> list[GradBucket]:
    """Each gradient all-reduce, those of a stage in the order in which backward fills them."""
    if plan.schedule.versions:
        return []  # every update reduces its own gradients
    table = plan.params()
    owned = gradient_owners(plan)
    buckets: list[tuple[tuple, list[str]]] = []
    room: dict[tuple, tuple[int, list[str]]] = {}
    gathered = {p.name for s in plan.steps if s.gather is not None for p in s.params}
    for weight in reversed(plan.weights):
        axes = plan.reduced_over(weight.name, table)
        if not axes or not weight.trainable:
            continue
        users = plan.users(weight.name)
        among = plan.holders(weight.name) if STAGE_AXIS in axes else ()
        # with a synchroniser FSDP2's hooks tell when a shard's gradient is there, where no
        # stages part its backward
        late = (
            weight.name in gathered and not (plan.uses_custom_dp_sync and plan.staging is None)
        ) or len(users) > 1
        owner = owned.get(weight.name, 0)
        # what ranks hold alike they encode alike: not in one message with what each has its own
        # part of
        cut = (
            tuple(a for a, p in table[weight.name].items() if p.stored != COPY)
            if plan.uses_custom_dp_sync
            else ()
        )
        key = (
            axes,
            among,
            None if late else users[0],
            owner,
            weight.dtype,
            weight.name in gathered,
            cut,
        )
        left, names = room.get(key, (0, []))
        nbytes = prod(plan.local_shape(weight, table)) * plan.dtypes.reduced(weight.dtype).itemsize
        if nbytes > left:
            left, names = (
                (plan.sync.bucket_bytes if plan.sync is not None else BUCKET_BYTES),
                [],
            )
            buckets.append((key, names))
        names.append(weight.name)
        room[key] = (left - nbytes, names)
    return [
        GradBucket(axes, tuple(names), among, stage, owner)
        for (axes, among, stage, owner, *_), names in buckets
    ]


def gradient_owners(plan: Plan) -> dict[str, int]:
    """Parameter -> the replica that alone updates it; empty where all do."""
    sync = plan.gradient_sync
    if not plan.uses_custom_dp_sync or sync is None or not sync.updates_on_servers:
        return {}
    trained = [w for w in plan.every or plan.weights if w.trainable]
    found = bucket_owners([prod(w.shape) for w in trained], sync.servers)
    return {w.name: owner for w, owner in zip(trained, found, strict=True)}
