"""Sums of gradients and gathers of sharded weights, as far as compute does not hide them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from weft.core import (
    REPLICA_AXIS,
    STAGE_AXIS,
)
from weft.parallel import (
    EXPERT_AXES,
    SEQUENCE_AXES,
    STATE_AXES,
    TOKEN_AXES,
)

from .breakdown import CostPart, TimePart
from .compute import BlockSeconds
from .layout_batch import Array
from .memory import shard_counts, stage_params, tied_params
from .model_work import Held
from .network import RankGroup, choose_group
from .replica_sync import steps_independently, sync_cost

if TYPE_CHECKING:
    pass
from .cost_inputs import CostInputs


def gradient_parts(at: CostInputs, slow: BlockSeconds) -> tuple[list[CostPart], Array]:
    """Sums of gradients over data axes, and gathers of sharded weights, as far as compute does not
    hide them; and the seconds of an exchange between replicas that step by themselves, which the
    parts do not hold."""
    c, net, practice, item = (
        at.choices,
        at.network,
        at.practice,
        at.practice.reduce_bytes,
    )
    few, _ = shard_counts(c)
    routed, plain = _stage_params(at, "trained")
    m, zero = c.accumulate, np.zeros(len(c))
    back, forth = slow.backward + slow.weight + slow.again, slow.forward
    sharded, zero3 = c.state_ranks > 1, (c.state_ranks > 1) & (c.zero >= 3)
    every = np.where(sharded & (c.zero >= 2), m, 1)
    whole = sharded & (c.zero < 2) & practice.sums_whole
    scattered = sharded & ~whole  # sums leave each rank its shard

    # gathers, and sums that leave each rank its shard: over fsdp, or as Megatron-LM also over
    # ranks of a sequence
    wide = sharded & (c.shards > c.state_ranks)
    inner = net.group(c, *STATE_AXES)
    if wide.any():
        inner = choose_group(wide, net.group(c, *STATE_AXES, *SEQUENCE_AXES), inner)
    gradients, graded_again = _sharded_params(at, "trained")
    weights, again = _sharded_params(at, "params")
    in_int8, _ = _sharded_params(at, "in_int8")
    narrow = in_int8 / np.maximum(weights, 1.0)  # of weights, the share that is a byte each
    gather_bytes = practice.gather_bytes * (1 - narrow) + narrow
    wire = (inner.size - 1) / inner.size
    sizes = at.work.units
    units = 1 + practice.messages * sizes.each * at.stages[0].layers * at.work.depth
    scatter = np.where(
        scattered, net.gather_s(gradients * item, inner, "reduce_scatter", units), 0.0
    )
    gathered = np.where(sharded, net.gather_s(weights * gather_bytes, inner, count=units), 0.0)
    # what is no repeated block is gathered once for a microbatch's forward and backward, in a
    # pipeline once a step
    once = np.where(c.stage_ranks > 1, 1, m)
    reduces = every * graded_again + np.minimum(every, once) * (1 - graded_again)
    gathers = np.where(zero3, 2 * m * again + once * (1 - again), 1)
    at.traffic[STATE_AXES[0]] = wire * (
        gradients * np.where(whole, 0, reduces) * item + weights * gathers * gather_bytes
    )

    # what is left to sum: all of it or the shard, over the other axes whose ranks have other
    # tokens
    joint, alone = at.sync is None or at.sync.plain, net.group(c)
    apart = scattered | (not joint)  # over dp by itself
    second = np.where(c.stage_ranks > 1, tied_params(at.stages[0], at.work, c), 0.0)
    parted = np.where(apart, plain, plain - second) / np.where(whole, 1.0, inner.size)
    others = net.group(c, *EXPERT_AXES, *SEQUENCE_AXES)
    if wide.any():
        others = choose_group(wide, net.group(c, *EXPERT_AXES), others)
    if joint:
        others = choose_group(
            sharded, others, net.group(c, REPLICA_AXIS, *EXPERT_AXES, *SEQUENCE_AXES)
        )
        if whole.any():
            everyone = net.group(c, REPLICA_AXIS, *STATE_AXES, *EXPERT_AXES, *SEQUENCE_AXES)
            others = choose_group(whole, everyone, others)
    sums = sync_cost(net, others, parted, item, None)
    at.sent_over((*EXPERT_AXES, *SEQUENCE_AXES), np.where(apart, sums.sent_bytes, 0.0))
    at.sent_over(
        (REPLICA_AXIS, *STATE_AXES, *EXPERT_AXES, *SEQUENCE_AXES),
        np.where(apart, 0.0, sums.sent_bytes),
    )
    rate = at.cluster.hardware.device.memory_bps * at.era.memory
    waits = sums.seconds + np.where(whole, plain * practice.whole_bytes / rate, 0.0)
    exchanged = zero
    if apart.any():
        sums = sync_cost(
            net, choose_group(apart, net.group(c, REPLICA_AXIS), alone), parted, item, at.sync
        )
        at.sent(REPLICA_AXIS, sums.sent_bytes)
        exchanged = exchanged + sums.seconds
    if routed.any() and steps_independently(
        at.sync
    ):  # none of whose experts are in another replica
        sums = sync_cost(net, _same_experts(at, few, within=True), routed / few, item, None)
        at.sent_over(SEQUENCE_AXES, sums.sent_bytes)
        waits = waits + np.where(routed > 0, sums.seconds, 0.0)
        sums = sync_cost(net, net.group(c, REPLICA_AXIS), routed / few, item, at.sync)
        at.sent(REPLICA_AXIS, sums.sent_bytes)
        exchanged = exchanged + np.where(routed > 0, sums.seconds, 0.0)
    elif routed.any():
        sums = sync_cost(net, _same_experts(at, few), routed / few, item, at.sync)
        at.sent_over((REPLICA_AXIS, *SEQUENCE_AXES), sums.sent_bytes)
        exchanged = exchanged + np.where(routed > 0, sums.seconds, 0.0)
    if second.any():
        both = choose_group(second > 0, _ends(at).beside(choose_group(apart, alone, others)), alone)
        sums = sync_cost(net, both, second, item, None)
        at.sent(STAGE_AXIS, sums.sent_bytes)
        waits = waits + sums.seconds
    found = []

    def part(name: str, comm: Array, hides: Array, times: Array | int) -> None:
        found.append(at.exposed(name, comm, hides, times))

    if not steps_independently(at.sync):
        waits = waits + exchanged
    part(TimePart.GRADIENTS, waits, back, 1)
    if sharded.any():
        part(TimePart.FSDP_REDUCE, scatter, back, every)
        hides = zero if practice.awaits_weights else np.where(zero3, 0.0, forth)
        part(TimePart.FSDP_GATHER, np.where(zero3, 0.0, gathered), hides, 1)
        if zero3.any():
            first = min(1.0, max(sizes.largest / max(1, at.work.depth), sizes.left))
            part(
                TimePart.FSDP_FORWARD_GATHER,
                np.where(zero3, gathered, 0.0),
                forth * (1 - first),
                m,
            )
            part(
                TimePart.FSDP_BACKWARD_GATHER,
                np.where(zero3, again * gathered, 0.0),
                np.maximum(back - at.era.hidden * scatter, 0.0),
                m,
            )
    return found, exchanged


def _stage_params(at: CostInputs, held: Held) -> tuple[Array, Array]:
    """Parameters of the first stage, those that are `held`: of experts that are spread over ranks,
    and all others."""
    routed, plain = stage_params(at.stages[0], at.work, at.choices, held)
    alike = at.choices.experts <= 1  # every rank has all experts
    return np.where(alike, 0.0, routed), plain + np.where(alike, routed, 0.0)


def _sharded_params(at: CostInputs, held: Held) -> tuple[Array, Array]:
    """Parameters of the first stage that fsdp shards, those that are `held`; and which share of
    them is in units that are freed between forward and backward."""
    c = at.choices
    routed, plain = _stage_params(at, held)
    few, _ = shard_counts(c)
    own = plain + np.where(few > 1, routed, 0.0)
    ends = replace(at.stages[0], layers=np.zeros(len(c)))
    repeated = own - sum(stage_params(ends, at.work, c, held))
    freed = repeated * (1 - at.work.units.left)
    return own, np.where(c.state_ranks > 1, freed, 0.0) / np.maximum(own, 1.0)


def _same_experts(at: CostInputs, few: Array, within: bool = False) -> RankGroup:
    """The ranks that have other tokens and the same part of the same experts: all, or those
    `within` a replica."""
    axes = [axis for axis in TOKEN_AXES if not (within and axis == REPLICA_AXIS)]
    everyone, spread = at.network.group(at.choices, *axes), at.expert_group()
    parts = np.maximum(spread.size, 1) * few
    inside = tuple(
        np.maximum(1, all_ / near)
        for all_, near in zip(everyone.inside, spread.inside, strict=True)
    )
    size = np.maximum(1, everyone.size / parts)
    return RankGroup(size, (*(np.minimum(size, near) for near in inside[:-1]), size))


def _ends(at: CostInputs) -> RankGroup:
    """The first and the last rank of a pipeline."""
    everyone = at.network.group(at.choices, STAGE_AXIS)
    size = np.minimum(2.0, everyone.size)
    return RankGroup(
        size, tuple(np.where(near >= everyone.size, size, 1.0) for near in everyone.inside)
    )
