"""The collectives of norms whose statistics are those of several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from weft.core import Plan, Step, computes_whole_sequences

from .axes import batchnorm_axes
from .comm_queries import BoundaryShape, Collective


def batchnorm_comms(
    plan: Plan,
    name: str,
    again: int,
    crossings: Mapping[str, BoundaryShape],
    itemsize: int,
    count: int,
) -> Iterator[Collective]:
    """Of a batch norm that is called `count` times in forward, and `again` in backward."""
    crossing = crossings.get(name)
    if crossing is None or crossing.entered is None:
        return
    axis = ".".join(plan.layout.active_axes(*batchnorm_axes(plan, name)))
    if not axis:
        return
    # [samples, channels, ...], of which a shape per sample lacks the first; and how many elements
    nbytes = (crossing.entered[0 if crossing.batched else 1] + 1) * max(4, itemsize)
    recomputed = ("recompute", "recompute") * again
    needing = crossing.needs_grad if crossing.needing is None else crossing.needing
    back = ("backward", "backward") * needing
    for when in (*("forward", "forward") * count, *back, *recomputed):
        yield Collective("all_reduce", axis, nbytes, when, name)


def mean_comms(
    plan: Plan,
    step: Step,
    again: int,
    crossing: BoundaryShape,
    itemsize: int,
    count: int,
) -> Iterator[Collective]:
    """Of a norm of features that ranks share: one number for each position. It is called `count`
    times in forward, and `again` in backward."""
    if crossing.entered is None or plan.layout.size(step.mean_over) == 1:
        return
    rows = crossing.rows(crossing.entered, plan.microbatch)
    whole = computes_whole_sequences(plan.steps, step.module.rpartition(".")[0])
    positions = round(rows * prod(crossing.entered[:-1])) // (1 if whole else plan.sequence_size)
    needing = crossing.needs_grad if crossing.needing is None else crossing.needing
    times = ("forward",) * count + ("backward",) * needing
    for when in (*times, *("recompute",) * again):
        nbytes = positions * max(4, itemsize)
        yield Collective("all_reduce", step.mean_over, nbytes, when, step.module)
