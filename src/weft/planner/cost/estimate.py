"""Estimate: time, memory and traffic of many choices at once, each as named parts that sum to it.

A step is m microbatches on the slowest stage, the pipeline's idle time, its messages, the sums of
gradients that compute does not hide, the optimizer, and what goes with no size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from weft.core import (
    REPLICA_AXIS,
    STAGE_AXIS,
    ActionCosts,
)
from weft.parallel import (
    DATA_AXES,
    EXPERT_AXES,
    FEATURE_AXES,
    HEAD_AXES,
    KEY_AXES,
    SEQUENCE_AXES,
    STATE_AXES,
    TOKEN_AXES,
    VOCABULARY_AXES,
)
from weft.pipeline import schedules

from .breakdown import CostPart
from .compute import BlockSeconds, attention_peak, block_seconds, ranks_dividing, sum_seconds
from .hardware import GIB, Cluster, Era
from .layer_correction import MEASURED, layer_factor, layer_shapes
from .layout_batch import Array, LayoutBatch
from .memory import input_bytes, kv_bytes, peak_memory, shard_counts, stage_params, tied_params
from .model_work import BlockWork, ModelWork
from .network import Network, RankGroup, choose_group
from .pipeline_stages import StageShare, chain_parts, is_v_shaped, recomputed_share, stage_shares
from .precision_policy import PrecisionPolicy
from .replica_sync import server_count, steps_independently, sync_cost, wait_s
from .schedule_replay import replay_schedule

if TYPE_CHECKING:
    from weft.core import Sync


@dataclass(frozen=True)
class Estimate:
    """Of each choice: seconds of a step and bytes of a rank's peak, in parts; `reserved_bytes`:
    with what the allocator keeps in reserve; `process_bytes`: and the driver, where memory is not
    short; `traffic`: bytes that a rank of the first stage sends in a step over each axis, where
    what several axes sum together is the first one's of dp, ep, cp and up, and what travels to
    experts is ep's; `mfu` by the model's definition; whether it fits, or by how many bytes it does
    not."""

    time: tuple[CostPart, ...]
    memory: tuple[CostPart, ...]
    traffic: Mapping[str, Array]
    step_s: Array
    peak_bytes: Array
    reserved_bytes: Array
    process_bytes: Array
    fits: Array
    over_bytes: Array
    mfu: Array
    tokens_per_s: Array


def estimate(
    work: ModelWork,
    choices: LayoutBatch,
    cluster: Cluster,
    era: Era,
    practice: PrecisionPolicy,
    sync: Sync | None = None,
) -> Estimate:
    """Prices every choice, about a million of them in ten seconds. Raises ConfigError for a dtype
    without a peak."""
    priced = CostModel(work, choices, cluster, era, practice, sync)
    time, memory = priced.time(), priced.memory()
    zero = np.zeros(len(choices))
    step = sum((part.value for part in time), zero)
    held_bytes = sum((part.value for part in memory), zero)
    reserved, context = held_bytes * era.reserved, era.context_gib * GIB
    # the allocator gives back what it has to spare before it fails
    over = held_bytes + context - cluster.hardware.device.memory_gib * GIB
    peak_flops = cluster.hardware.peak(practice.compute) * choices.world
    return Estimate(
        time,
        memory,
        priced.traffic,
        step,
        held_bytes,
        reserved,
        reserved + context,
        over <= 0,
        np.maximum(over, 0.0),
        mfu=work.model_flops * choices.batch / (step * peak_flops),
        tokens_per_s=work.tokens * choices.batch / step,
    )


def stage_costs(
    work: ModelWork,
    choices: LayoutBatch,
    index: int,
    cluster: Cluster,
    era: Era,
    practice: PrecisionPolicy,
) -> ActionCosts:
    """What `simulate` asks of one choice: seconds of each stage of its pipeline for a
    microbatch."""
    one = choices.take(np.array([index]))
    priced = CostModel(work, one, cluster, era, practice, None)
    p, v = int(one.stage_ranks[0]), int(one.chunks[0])
    count = p * v
    first, between, last = stage_shares(work, one)
    layers = [between.layers[0] / v] * count
    layers[0], layers[-1] = first.layers[0] / v, last.layers[0] / v
    total = sum(layers) or 1.0
    found = []
    for stage, share in enumerate(layers):
        ends = (np.ones(1) * (stage == 0), np.ones(1) * (stage == count - 1))
        found.append(priced.rank(StageShare(np.array([share / total]), *ends)).seconds)
    return ActionCosts(
        forward_s=tuple(float(s.forward[0]) for s in found),
        backward_s=tuple(float(s.backward[0] + s.again[0]) for s in found),
        weight_s=tuple(float(s.weight[0]) for s in found),
        comm_s=float(priced.message_s[0]),
    )


@dataclass
class BlockCost:
    """What one rank does for one microbatch: `seconds` in all, which it computes and waits for
    `waits` by axis."""

    seconds: BlockSeconds
    waits: dict[str, Array]

    def scaled(self, by: Array | float) -> BlockCost:
        """So many times as long."""
        return BlockCost(
            self.seconds.scaled(by), {axis: value * by for axis, value in self.waits.items()}
        )


def sum_costs(those: Sequence[BlockCost]) -> BlockCost:
    """One after the other."""
    waits: dict[str, Array] = {}
    for one in those:
        for axis, value in one.waits.items():
            waits[axis] = waits[axis] + value if axis in waits else value
    return BlockCost(sum_seconds(one.seconds for one in those), waits)


def _reducing_axes(block: BlockWork) -> tuple[str, ...]:
    """The axes over which a block's activations are summed."""
    return VOCABULARY_AXES if block.elements("vocabulary") else FEATURE_AXES


class CostModel:
    """The pieces of an estimate; each is worked out once."""

    def __init__(
        self,
        work: ModelWork,
        choices: LayoutBatch,
        cluster: Cluster,
        era: Era,
        practice: PrecisionPolicy,
        sync: Sync | None,
    ):
        again, self._again_least = recomputed_share(work, choices)
        self.work, self.choices, self.cluster = work, replace(choices, again=again), cluster
        self.era, self.practice, self.sync = era, practice, sync
        self.network = Network(cluster, era)
        self.traffic: dict[str, Array] = {}
        self._samples = choices.microbatch / choices.sequences
        self._blocks = [(block, self._block(block)) for block in work.blocks]

    # ---- one microbatch --------------------------------------------------------------------------

    def _block(self, block: BlockWork) -> BlockCost:
        """Compute and the exchanges that it waits for, within one block."""
        c, zero = self.choices, np.zeros(len(self.choices))
        again = c.again if block.repeated else zero
        core = np.where(
            c.selective, 1.0, again
        )  # what attention's core waits for comes again with it
        waits = {
            axis: (one, other, (core if axis in SEQUENCE_AXES else again) * one)
            for axis, (one, other) in self._exchanges(block).items()
        }
        sides = (sum((each[side] for each in waits.values()), zero) for side in range(3))
        found = block_seconds(
            block, c, self.cluster.hardware, self.era, self.practice.compute, *sides
        )
        if self.era.layers and block.repeated:
            found = found.longer(
                layer_factor(self.era.layers, layer_shapes(self.work, block, c)), MEASURED
            )
        return BlockCost(found, {axis: sum(each, zero) for axis, each in waits.items()})

    def _exchanges(self, block: BlockWork) -> dict[str, tuple[Array, Array]]:
        """Axis -> seconds that the forward of a block waits for it, and its backward."""
        c, net, found = self.choices, self.network, {}
        ahead, back = self._reduced(block)
        for axis in _reducing_axes(block) if ahead or back else ():
            if not (c.sizes[axis] > 1).any():
                continue
            group, count = net.group(c, axis), max(1.0, block.reductions)
            nbytes = max(ahead, back) * self._samples / count
            pair = net.gather_s(nbytes, group) + net.gather_s(nbytes, group, "reduce_scatter")
            whole = net.reduce_s(nbytes, group)
            # outside of the blocks the sequence is whole, and where they begin or end it is parted
            # or gathered
            once = count * np.where(c.sequence, pair if block.repeated else whole + pair / 2, whole)
            found[axis] = (once * (ahead > 0), once * (back > 0))
        share = self._samples / c.feature_ranks
        for axis in KEY_AXES if block.key_bytes else ():
            if (c.sizes[axis] > 1).any():
                found[axis] = self._keys(block, axis)
        for axis in HEAD_AXES if block.key_bytes else ():
            if (c.sizes[axis] > 1).any():
                nbytes = (block.query_bytes + block.key_bytes) * share
                once = net.exchange_s(nbytes, net.group(c, axis))
                found[axis] = (once, once)
        if block.routed_bytes and (c.experts > 1).any():
            once = 2 * net.exchange_s(block.routed_bytes * self._samples, self._experts())
            found[EXPERT_AXES[0]] = (once, once)
        return found

    def _keys(self, block: BlockWork, axis: str) -> tuple[Array, Array]:
        """Seconds that attention's forward waits for keys and values of other ranks of cp, and its
        backward: round a ring beside it, or gathered before it, and gradients brought home."""
        c, net, size = self.choices, self.network, self.choices.sizes[axis]
        whole = kv_bytes(block, c)
        turn = net.send_s(whole / size, c, axis)
        attention = (
            sum(op.flops for op in block.ops if op.kind == "attention")
            * self._samples
            / c.feature_ranks
        )
        rate = attention_peak(self.cluster.hardware, self.practice.compute) * self.era.attention
        steps = size - 1
        forward = steps * np.maximum(0.0, turn - attention / size / rate) + np.where(
            size > 1, 0.1 * turn, 0.0
        )
        if not c.gather.any():
            return forward, 2 * forward
        item, group, both = self.work.itemsize, net.group(c, axis), 2  # keys, and values
        once = net.gather_s(whole, group, count=both)
        home = net.gather_s(whole * max(4, item) / item, group, "reduce_scatter", both)
        return np.where(c.gather, once, forward), np.where(c.gather, once + home, 2 * forward)

    def _reduced(self, block: BlockWork) -> tuple[float, float]:
        """Bytes of activations that tp sums in a block's forward, and in its backward: tokens,
        which an embedding reads, have no gradient, and of a head whose logits stay divided only
        what it reads has one to sum."""
        if block.repeated or block.reductions:
            return block.reduced_bytes, block.reduced_bytes if block.repeated else 0.0
        head = self.work.vocab and any(
            op.kind == "matmul" and op.cut == "vocabulary" for op in block.ops
        )
        return 0.0, self.work.blocks[0].output_bytes if head else 0.0

    def _experts(self) -> RankGroup:
        """The ranks over which experts are spread: of all that have other tokens, those nearest."""
        c, net = self.choices, self.network
        everyone = choose_group(
            c.experts <= c.size(*DATA_AXES), net.group(c, *DATA_AXES), net.group(c, *TOKEN_AXES)
        )
        size = np.maximum(c.experts, 1).astype(float)
        return RankGroup(size, tuple(np.minimum(size, inside) for inside in everyone.inside))

    @cached_property
    def _thirds(self) -> tuple[BlockCost, BlockCost, BlockCost]:
        """What is before the repeated blocks, these, and what is after, each as a whole."""
        before, repeated, _ = chain_parts(self.work)
        ends = len(before), len(before) + len(repeated)
        cuts = (self._blocks[: ends[0]], self._blocks[ends[0] : ends[1]], self._blocks[ends[1] :])
        first, among, last = (
            [carried.scaled(block.count) for block, carried in those] for those in cuts
        )
        nothing = self._blocks[0][1].scaled(0.0)
        return (
            sum_costs(first or [nothing]),
            sum_costs(among or [nothing]),
            sum_costs(last or [nothing]),
        )

    def rank(self, stage: StageShare) -> BlockCost:
        """All blocks of one rank of a stage."""
        before, repeated, after = self._thirds
        return sum_costs(
            [before.scaled(stage.before), repeated.scaled(stage.layers), after.scaled(stage.after)]
        )

    @cached_property
    def _stages(self) -> tuple[StageShare, StageShare, StageShare]:
        return stage_shares(self.work, self.choices)

    @cached_property
    def _slowest(self) -> tuple[BlockCost, Array]:
        """What the stage that sets the pace does for a microbatch; and seconds of a stage in the
        mean."""
        before, repeated, after = (third.seconds.total for third in self._thirds)
        totals = [s.before * before + s.layers * repeated + s.after * after for s in self._stages]
        first, between, last = self._stages
        p = self.choices.stage_ranks
        ahead, late = (
            totals[0] >= totals[2],
            (p > 2) & (np.maximum(totals[0], totals[2]) < totals[1]),
        )
        slow = StageShare(
            *(
                np.where(late, m, np.where(ahead, f, e))
                for f, m, e in zip(
                    (first.layers, first.before, first.after),
                    (between.layers, between.before, between.after),
                    (last.layers, last.before, last.after),
                    strict=True,
                )
            )
        )
        several = totals[0] + totals[2] + np.maximum(p - 2, 0) * totals[1]
        return self.rank(slow), np.where(p > 1, several, totals[0]) / p

    @cached_property
    def message_s(self) -> Array:
        """Seconds of one message between stages."""
        entry = self.work.blocks[0].output_bytes
        features = self.choices.feature_ranks
        parted = features if self.practice.scatters else ranks_dividing("sequence", self.choices)
        return self.network.send_s(entry * self._samples / parted, self.choices, STAGE_AXIS)

    # ---- a step ----------------------------------------------------------------------------------

    def time(self) -> tuple[CostPart, ...]:
        c, era = self.choices, self.era
        m, p, v = c.accumulate, c.stage_ranks, c.chunks
        slow, _ = self._slowest
        said = {MEASURED: "what the era's layers took beyond its constants,"}
        found = [
            CostPart(
                kind,
                m * value,
                f"m x microbatch_s, {said.get(kind, kind)} of the slowest stage",
                {"m": m, "microbatch_s": value},
            )
            for kind, value in slow.seconds.of.items()
        ]
        found += [
            CostPart(
                f"{axis} exposed",
                m * value,
                f"m x microbatch_s, waits for {axis}",
                {"m": m, "microbatch_s": value},
            )
            for axis, value in slow.waits.items()
        ]
        found.append(self._bubble[0])
        # where chunks send beside compute, what fills the pipeline is waited for all the same
        turns = np.where(p > 1, np.where(self.practice.sends_beside & (v > 1), p - 1, m + p - 2), 0)
        found.append(
            CostPart(
                "pp exposed",
                2 * v * turns * self.message_s,
                "2 x v x turns x message_s, turns = m + p - 2 or p - 1",
                {"turns": turns, "v": v, "message_s": self.message_s},
            )
        )
        gradients = self._gradients(slow.seconds)
        found += gradients
        if c.offload.any():
            found.append(self._host(slow.seconds))
        if self.practice.added_bytes:
            found.append(self._added())
        update = self._update()
        found.append(update)
        found.append(
            CostPart("fixed", np.full(len(c), era.fixed_s), "fixed_s", {"fixed_s": era.fixed_s})
        )
        if steps_independently(self.sync):
            rest_s = sum((part.value for part in found), np.zeros(len(c)))
            found[found.index(gradients[0])] = self._agreed(gradients[0], rest_s, update.value)
        if era.jitter:
            total = sum((part.value for part in found), np.zeros(len(c)))
            nodes = np.maximum(1, c.world / self.cluster.hardware.node)
            found.append(
                CostPart(
                    "stragglers",
                    era.jitter * np.sqrt(np.log2(nodes)) * total,
                    "jitter x sqrt(log2(nodes)) x rest",
                    {"jitter": era.jitter, "nodes": nodes},
                )
            )
        self._note_traffic()
        return tuple(found)

    @cached_property
    def _bubble(self) -> tuple[CostPart, tuple[Array, Array]]:
        """What a pipeline waits; and the microbatches that its first and its last rank hold
        activations of at most."""
        c, p = self.choices, self.choices.stage_ranks
        slow, mean = self._slowest
        s, whole = slow.seconds, slow.seconds.total
        share = np.where(
            whole > 0,
            (p * mean - whole) / np.where(p > 1, p - 1, 1) / np.where(whole > 0, whole, 1),
            0.0,
        )
        costs = [
            np.maximum(share, 0.0) * value for value in (s.forward, s.backward + s.again, s.weight)
        ]
        idle, first, last = np.zeros(len(c)), np.ones(len(c)), np.ones(len(c))
        for place, name in enumerate(c.schedules):
            here = c.schedule == place
            if not here.any():
                continue
            closed, asked = schedules.summarize(name), (p, c.accumulate, c.chunks, *costs)
            brief = (
                closed(*asked)
                if closed is not None
                else replay_schedule(name, here & (p > 1), *asked)
            )
            idle, first, last = (
                np.where(here, new, old)
                for new, old in zip(brief, (idle, first, last), strict=True)
            )
        part = CostPart(
            "bubble",
            np.where(p == 1, 0.0, idle),
            "what the schedule waits: its closed form over p, m, v and F, B, W of a stage",
            {"p": p, "m": c.accumulate, "v": c.chunks, "F": costs[0], "B": costs[1], "W": costs[2]},
        )
        return part, (np.where(p == 1, 1.0, first), np.where(p == 1, 1.0, last))

    def _gradients(self, slow: BlockSeconds) -> list[CostPart]:
        """Sums of gradients over data axes, and gathers of sharded weights, as far as compute does
        not hide them."""
        c, net, practice, item = (
            self.choices,
            self.network,
            self.practice,
            self.practice.reduce_bytes,
        )
        routed, plain = stage_params(self._stages[0], self.work, c)
        few, _ = shard_counts(c)
        alike = c.experts <= 1  # every rank has all experts
        routed, plain = np.where(alike, 0.0, routed), plain + np.where(alike, routed, 0.0)
        m, zero = c.accumulate, np.zeros(len(c))
        back, forth = slow.backward + slow.weight + slow.again, slow.forward
        sharded, zero3 = c.state_ranks > 1, (c.state_ranks > 1) & (c.zero >= 3)
        every = np.where(sharded & (c.zero >= 2), m, 1)

        # gathers, and sums that leave each rank its shard: over fsdp, or as Megatron-LM also over
        # ranks of a sequence
        wide = sharded & (c.shards > c.state_ranks)
        inner = net.group(c, *STATE_AXES)
        if wide.any():
            inner = choose_group(wide, net.group(c, *STATE_AXES, *SEQUENCE_AXES), inner)
        own = plain + np.where(few > 1, routed, 0.0)
        wire = (inner.size - 1) / inner.size
        units = 1 + practice.messages * self._stages[0].layers * self.work.depth
        scatter = np.where(sharded, net.gather_s(own * item, inner, "reduce_scatter", units), 0.0)
        gathered = np.where(
            sharded, net.gather_s(own * practice.gather_bytes, inner, count=units), 0.0
        )
        # what is no repeated block is gathered once for a microbatch's forward and backward, in a
        # pipeline once a step
        repeated = np.where(
            sharded,
            own - sum(stage_params(replace(self._stages[0], layers=zero), self.work, c)),
            0.0,
        )
        again, once = repeated / np.maximum(own, 1.0), np.where(c.stage_ranks > 1, 1, m)
        reduces = every * again + np.minimum(every, once) * (1 - again)
        gathers = np.where(zero3, 2 * m * again + once * (1 - again), 1)
        self.traffic[STATE_AXES[0]] = (
            wire * own * (reduces * item + gathers * practice.gather_bytes)
        )

        # what is left to sum: all of it or the shard, over the other axes whose ranks have other
        # tokens
        joint, alone = self.sync is None or self.sync.plain, net.group(c)
        apart = sharded | (not joint)  # over dp by itself
        second = np.where(c.stage_ranks > 1, tied_params(self._stages[0], self.work, c), 0.0)
        parted = np.where(apart, plain, plain - second) / inner.size
        others = net.group(c, *EXPERT_AXES, *SEQUENCE_AXES)
        if wide.any():
            others = choose_group(wide, net.group(c, *EXPERT_AXES), others)
        if joint:
            others = choose_group(
                sharded, others, net.group(c, REPLICA_AXIS, *EXPERT_AXES, *SEQUENCE_AXES)
            )
        sums = sync_cost(net, others, parted, item, None)
        self._sent_over((*EXPERT_AXES, *SEQUENCE_AXES), np.where(apart, sums.sent_bytes, 0.0))
        self._sent_over(
            (REPLICA_AXIS, *EXPERT_AXES, *SEQUENCE_AXES), np.where(apart, 0.0, sums.sent_bytes)
        )
        waits, agreed = sums.seconds, zero
        if apart.any():
            sums = sync_cost(
                net, choose_group(apart, net.group(c, REPLICA_AXIS), alone), parted, item, self.sync
            )
            self._sent(REPLICA_AXIS, sums.sent_bytes)
            agreed = agreed + sums.seconds
        if routed.any() and steps_independently(
            self.sync
        ):  # none of whose experts are in another replica
            sums = sync_cost(net, self._same_experts(few, within=True), routed / few, item, None)
            self._sent_over(SEQUENCE_AXES, sums.sent_bytes)
            waits = waits + np.where(routed > 0, sums.seconds, 0.0)
            sums = sync_cost(net, net.group(c, REPLICA_AXIS), routed / few, item, self.sync)
            self._sent(REPLICA_AXIS, sums.sent_bytes)
            agreed = agreed + np.where(routed > 0, sums.seconds, 0.0)
        elif routed.any():
            sums = sync_cost(net, self._same_experts(few), routed / few, item, self.sync)
            self._sent_over((REPLICA_AXIS, *SEQUENCE_AXES), sums.sent_bytes)
            agreed = agreed + np.where(routed > 0, sums.seconds, 0.0)
        if second.any():
            both = choose_group(
                second > 0, self._ends().beside(choose_group(apart, alone, others)), alone
            )
            sums = sync_cost(net, both, second, item, None)
            self._sent(STAGE_AXIS, sums.sent_bytes)
            waits = waits + sums.seconds
        found = []

        def part(name: str, comm: Array, hides: Array, times: Array | int) -> None:
            found.append(self._exposed(f"{name} exposed", comm, hides, times))

        if steps_independently(self.sync):
            self._agreed_s = agreed
        else:
            waits = waits + agreed
        part(REPLICA_AXIS, waits, back, 1)
        if sharded.any():
            part("fsdp reduce", scatter, back, every)
            part("fsdp gather", np.where(zero3, 0.0, gathered), np.where(zero3, 0.0, forth), 1)
            if zero3.any():
                per_block = 1.0 / max(1, self.work.depth)
                part(
                    "fsdp forward gather",
                    np.where(zero3, gathered, 0.0),
                    forth * (1 - per_block),
                    m,
                )
                part(
                    "fsdp backward gather",
                    np.where(zero3, again * gathered, 0.0),
                    np.maximum(back - self.era.hidden * scatter, 0.0),
                    m,
                )
        return found

    def _exposed(self, name: str, comm: Array, hides: Array, times: Array | int) -> CostPart:
        """What is sent so many `times`, as far as what `hides` it takes less long."""
        hidden = (
            np.minimum(self.era.hidden * comm, hides)
            if self.practice.overlaps
            else np.zeros(len(comm))
        )
        exposed = times * (comm - hidden + self.era.contention * hidden)
        symbols = {
            "times": times + np.zeros(len(comm)),
            "comm_s": comm,
            "hidden_s": hidden,
            "contention": self.era.contention,
        }
        return CostPart(
            name, exposed, "times x (comm_s - hidden_s + contention x hidden_s)", symbols
        )

    def _agreed(self, summed: CostPart, rest_s: Array, update_s: Array) -> CostPart:
        """What a replica that steps by itself waits for others, and for gradients `summed` within
        it."""
        assert self.sync is not None
        replicas, exchange_s = self.choices.replicas, self._agreed_s
        waits, formula, values = wait_s(self.sync, exchange_s, replicas, rest_s, update_s)
        symbols = {"summed_s": summed.value, "exchange_s": exchange_s, **values}
        return CostPart(summed.name, summed.value + waits, f"summed_s + {formula}", symbols)

    def _host(self, slow: BlockSeconds) -> CostPart:
        """What comes from the host's memory and goes there, of each microbatch."""
        c, practice, rests = self.choices, self.practice, self.practice.offloads
        once, nbytes = 1 / c.accumulate, np.zeros(len(c))
        if (
            "weights" in rests or "optimizer" in rests
        ):  # for forward and backward, or when they are updated
            weights = np.where(c.zero >= 3, 2.0, once) if "weights" in rests else once
            nbytes = nbytes + self._own * weights * practice.weight_bytes
        if "gradients" in rests or "optimizer" in rests:
            nbytes = nbytes + self._own * np.where(c.zero >= 2, 1.0, once) * practice.grad_bytes
        if "activations" in rests:
            blocks = self._stages[0].holds(self.work)
            nbytes = nbytes + 2 * c.again * sum(
                count * input_bytes(block, c) for block, count in blocks if block.repeated
            )
        comm = np.where(c.offload, nbytes / self.cluster.hardware.device.host_bps, 0.0)
        return self._exposed("host exposed", comm, slow.total, c.accumulate)

    @cached_property
    def _own(self) -> Array:
        """Parameters that a rank of the first stage updates."""
        routed, plain = stage_params(self._stages[0], self.work, self.choices)
        few, many = shard_counts(self.choices)
        return np.where(many > 1, routed / few + plain / many, routed + plain)

    def _same_experts(self, few: Array, within: bool = False) -> RankGroup:
        """The ranks that have other tokens and the same part of the same experts: all, or those
        `within` a replica."""
        axes = [axis for axis in TOKEN_AXES if not (within and axis == REPLICA_AXIS)]
        everyone, spread = self.network.group(self.choices, *axes), self._experts()
        parts = np.maximum(spread.size, 1) * few
        inside = tuple(
            np.maximum(1, all_ / near)
            for all_, near in zip(everyone.inside, spread.inside, strict=True)
        )
        size = np.maximum(1, everyone.size / parts)
        return RankGroup(size, (*(np.minimum(size, near) for near in inside[:-1]), size))

    def _ends(self) -> RankGroup:
        """The first and the last rank of a pipeline."""
        everyone = self.network.group(self.choices, STAGE_AXIS)
        size = np.minimum(2.0, everyone.size)
        return RankGroup(
            size, tuple(np.where(near >= everyone.size, size, 1.0) for near in everyone.inside)
        )

    def _sent_over(self, axes: Sequence[str], nbytes: Array) -> None:
        """Over several axes together: the first one's."""
        left = nbytes
        for axis in axes:
            here = self.choices.sizes[axis] > 1
            self._sent(axis, np.where(here, left, 0.0))
            left = np.where(here, 0.0, left)

    def _sent(self, axis: str, nbytes: Array) -> None:
        self.traffic[axis] = self.traffic.get(axis, 0.0) + nbytes

    def _added(self) -> CostPart:
        routed, plain = stage_params(self._stages[0], self.work, self.choices)
        few, many = shard_counts(self.choices)
        parted = (many > 1) & (
            self.choices.zero >= 2
        )  # each microbatch's is reduced, and the shard of it is added
        params = np.where(parted, routed / few + plain / many, routed + plain)
        m, nbytes = self.choices.accumulate, self.practice.added_bytes
        rate = self.cluster.hardware.device.memory_bps * self.era.memory
        return CostPart(
            "accumulation",
            m * params * nbytes / rate,
            "m x params x added_bytes / memory_bps",
            {"m": m, "params": params, "added_bytes": nbytes, "memory_bps": rate},
        )

    def _update(self) -> CostPart:
        c, device = self.choices, self.cluster.hardware.device
        away = c.offload & ("optimizer" in self.practice.offloads)
        rate = np.where(away, device.host_bps, device.memory_bps * self.era.memory)
        symbols: dict[str, Array | float] = {
            "params": self._own,
            "update_bytes": self.practice.update_bytes,
            "memory_bps": rate,
        }
        seconds, count = self._own * self.practice.update_bytes / rate, server_count(self.sync)
        if count < 2:
            return CostPart("optimizer", seconds, "params x update_bytes / memory_bps", symbols)
        parts = np.where(c.replicas > 1, count, 1.0)  # each server updates its own
        text = "params / servers x update_bytes / memory_bps"
        return CostPart("optimizer", seconds / parts, text, {**symbols, "servers": parts})

    def memory(self) -> tuple[CostPart, ...]:
        least = replace(self.choices, again=self._again_least)
        return peak_memory(self.work, least, self.practice, self._bubble[1], self.sync)

    def _note_traffic(self) -> None:
        """Bytes that a rank of the first stage sends in a step over the axes of the model."""
        c, m, item = self.choices, self.choices.accumulate, self.work.itemsize
        experts = np.maximum(c.experts, 1)
        for block, count in self._stages[0].holds(self.work):
            again = c.again if block.repeated else 0.0
            core = np.where(c.selective, 1.0, again)
            share = m * count * self._samples
            ahead, back = self._reduced(block)
            passes = 2.0 if block.repeated else np.where(c.sequence, 3, 2)  # as in `_exchanges`
            for axis in _reducing_axes(block):
                n = c.sizes[axis]
                self._sent(axis, passes * share * (n - 1) / n * ((1 + again) * ahead + back))
            # keys and values go round, again in backward, and their gradients home, in float32 at
            # least
            own = m * count * kv_bytes(block, c) / c.size(*KEY_AXES)
            for axis in KEY_AXES:
                n = c.sizes[axis]
                home = np.where(c.gather, n - 1, n) * max(4, item) / item
                self._sent(axis, own * np.where(n > 1, (2 + core) * (n - 1) + home, 0.0))
            queries = share / c.feature_ranks * block.query_bytes
            crossing = (2 + core) * (own + queries)
            unused = np.where(c.selective, queries / 2, 0.0)  # what the core gives
            for axis in HEAD_AXES:
                n = c.sizes[axis]
                self._sent(axis, (n - 1) / n * (crossing - unused))
            self._sent(
                EXPERT_AXES[0],
                2 * (2 + again) * share * (experts - 1) / experts * block.routed_bytes,
            )
        if self.work.vocab:  # maxima, sums and targets of the loss
            rows = m * self._samples * self._stages[0].after * self.work.tokens
            for axis in VOCABULARY_AXES:
                n = c.sizes[axis]
                self._sent(axis, 2 * (n - 1) / n * 3 * rows * max(4, item))
        entry = self.work.blocks[0].output_bytes * self._samples / ranks_dividing("sequence", c)
        self._sent(STAGE_AXIS, np.where(c.stage_ranks > 1, m * self._messages() * entry, 0.0))

    def _messages(self) -> Array:
        """Values and gradients that the first rank sends to others for a microbatch."""
        c, found = self.choices, np.zeros(len(self.choices))
        for place, name in enumerate(c.schedules):
            here = c.schedule == place
            if here.any():
                found = np.where(here, c.chunks if is_v_shaped(name) else 2 * c.chunks - 1, found)
        return found
