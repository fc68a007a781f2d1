"""Estimates time, memory and traffic of many layouts at once, each as named parts.

A step is m microbatches on the slowest stage, the pipeline's idle time, its messages, the sums of
gradients that compute does not hide, the optimizer, and what goes with no size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from weft.core import (
    STAGE_AXIS,
    ActionCosts,
)
from weft.parallel import DATA_AXES
from weft.pipeline import schedules

from .block_cost import BlockCost, block_cost, sum_costs
from .breakdown import CostPart, TimePart, exposed_over
from .compute import BlockSeconds, ranks_dividing
from .cost_inputs import CostInputs
from .gradient_cost import gradient_parts
from .hardware import GIB, Cluster, Era
from .layer_correction import MEASURED
from .layout_batch import Array, LayoutBatch
from .memory import (
    communicator_bytes,
    input_bytes,
    peak_memory,
    saved_bytes,
    shard_counts,
    stage_params,
)
from .model_work import BlockWork, ModelWork
from .pipeline_stages import StageShare, chain_parts, stage_shares
from .precision_policy import PrecisionPolicy
from .replica_sync import server_count, steps_independently, wait_s
from .schedule_replay import replay_schedule
from .traffic import note_traffic

if TYPE_CHECKING:
    from weft.core import Sync


@dataclass(frozen=True)
class Estimate:
    """Of each choice: seconds of a step and bytes of a rank's peak, in parts; `reserved_bytes`:
    with what the allocator keeps in reserve; `process_bytes`: and the driver and communicators,
    where memory is not short; `traffic`: bytes that a rank of the first stage
    sends in a step over each axis, where what several axes sum together is the first one's of dp,
    ep, cp and up, and what travels to experts is ep's; `mfu` by the model's definition; whether it
    fits, or by how many bytes it does not."""

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
    step = sum((part.value for part in time), np.zeros(len(choices)))
    held_bytes, over = _held(memory, choices, cluster, era)
    bucket = np.where(choices.size(*DATA_AXES) > 1, practice.bucket_bytes, 0.0)
    reserved, context = held_bytes * era.reserved + bucket, era.context_gib * GIB
    peak_flops = cluster.hardware.peak(practice.compute) * choices.world
    return Estimate(
        time,
        memory,
        priced.traffic,
        step,
        held_bytes,
        reserved,
        reserved + context + communicator_bytes(choices, era),
        over <= 0,
        over,
        mfu=work.model_flops * choices.batch / (step * peak_flops),
        tokens_per_s=work.tokens * choices.batch / step,
    )


def missing_memory(
    work: ModelWork,
    choices: LayoutBatch,
    cluster: Cluster,
    era: Era,
    practice: PrecisionPolicy,
    sync: Sync | None = None,
) -> Array:
    """By how many bytes each choice does not fit, as `estimate` has it, which also prices time."""
    memory = CostModel(work, choices, cluster, era, practice, sync).memory()
    return _held(memory, choices, cluster, era)[1]


def _held(
    memory: tuple[CostPart, ...], choices: LayoutBatch, cluster: Cluster, era: Era
) -> tuple[Array, Array]:
    """Bytes that each choice holds, and those that it is over by. The allocator gives back what it
    has to spare before it fails; what communicators take differs by NCCL's version, and runs that
    nearly fill a card had room for them."""
    held = sum((part.value for part in memory), np.zeros(len(choices)))
    over = held + (era.context_gib - cluster.hardware.device.memory_gib) * GIB
    return held, np.maximum(over, 0.0)


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


class CostModel(CostInputs):
    """The pieces of an estimate; each is worked out once."""

    @cached_property
    def _blocks(self) -> list[tuple[BlockWork, BlockCost]]:
        return [(block, block_cost(self, block)) for block in self.work.blocks]

    # ---- one microbatch --------------------------------------------------------------------------

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
    def _slowest(self) -> tuple[BlockCost, Array]:
        """What the stage that sets the pace does for a microbatch; and seconds of a stage in the
        mean."""
        before, repeated, after = (third.seconds.total for third in self._thirds)
        totals = [s.before * before + s.layers * repeated + s.after * after for s in self.stages]
        first, between, last = self.stages
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
        return self.network.send_s(entry * self.samples / parted, self.choices, STAGE_AXIS)

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
                exposed_over(axis),
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
                TimePart.MESSAGES,
                2 * v * turns * self.message_s,
                "2 x v x turns x message_s, turns = m + p - 2 or p - 1",
                {"turns": turns, "v": v, "message_s": self.message_s},
            )
        )
        gradients, exchange_s = gradient_parts(self, slow.seconds)
        found += gradients
        if c.offload.any() or self.practice.host_activations:
            found.append(self._host(slow.seconds))
        if self.practice.added_bytes:
            found.append(self._accumulation_part())
        update = self._update()
        found.append(update)
        found.append(
            CostPart(
                TimePart.FIXED, np.full(len(c), era.fixed_s), "fixed_s", {"fixed_s": era.fixed_s}
            )
        )
        if steps_independently(self.sync):
            rest_s = sum((part.value for part in found), np.zeros(len(c)))
            found[found.index(gradients[0])] = self._replica_wait(
                gradients[0], exchange_s, rest_s, update.value
            )
        if era.jitter:
            total = sum((part.value for part in found), np.zeros(len(c)))
            nodes = np.maximum(1, c.world / self.cluster.hardware.node)
            found.append(
                CostPart(
                    TimePart.STRAGGLERS,
                    era.jitter * np.sqrt(np.log2(nodes)) * total,
                    "jitter x sqrt(log2(nodes)) x rest",
                    {"jitter": era.jitter, "nodes": nodes},
                )
            )
        note_traffic(self)
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
            TimePart.BUBBLE,
            np.where(p == 1, 0.0, idle),
            "what the schedule waits: its closed form over p, m, v and F, B, W of a stage",
            {"p": p, "m": c.accumulate, "v": c.chunks, "F": costs[0], "B": costs[1], "W": costs[2]},
        )
        return part, (np.where(p == 1, 1.0, first), np.where(p == 1, 1.0, last))

    def _replica_wait(
        self, summed: CostPart, exchange_s: Array, rest_s: Array, update_s: Array
    ) -> CostPart:
        """What a replica that steps by itself waits for others, and for gradients `summed` within
        it."""
        assert self.sync is not None
        replicas = self.choices.replicas
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
            wide = (self.own_params - self.own_int8) * practice.weight_bytes
            nbytes = nbytes + (wide + self.own_int8) * weights
        if "gradients" in rests or "optimizer" in rests:
            nbytes = (
                nbytes
                + self.updated_params * np.where(c.zero >= 2, 1.0, once) * practice.grad_bytes
            )
        if "activations" in rests:
            blocks = self.stages[0].holds(self.work)
            nbytes = nbytes + 2 * c.again * sum(
                count * input_bytes(block, c) for block, count in blocks if block.repeated
            )
        nbytes = np.where(c.offload, nbytes, 0.0)
        if practice.host_activations:
            for block, count in self.stages[0].holds(self.work):
                if block.repeated:
                    # without a pipeline backward follows at once, and finds the last two
                    back = np.where(c.stage_ranks > 1, count, np.maximum(0, count - 2))
                    nbytes = nbytes + (count + back) * saved_bytes(block, c)
        comm = nbytes / self.cluster.hardware.device.host_bps
        return self.exposed(TimePart.HOST, comm, slow.total, c.accumulate)

    def _accumulation_part(self) -> CostPart:
        routed, plain = stage_params(self.stages[0], self.work, self.choices, "trained")
        few, many = shard_counts(self.choices)
        parted = (many > 1) & (
            self.choices.zero >= 2
        )  # each microbatch's is reduced, and the shard of it is added
        params = np.where(parted, routed / few + plain / many, routed + plain)
        m, nbytes = self.choices.accumulate, self.practice.added_bytes
        rate = self.cluster.hardware.device.memory_bps * self.era.memory
        return CostPart(
            TimePart.ACCUMULATION,
            m * params * nbytes / rate,
            "m x params x added_bytes / memory_bps",
            {"m": m, "params": params, "added_bytes": nbytes, "memory_bps": rate},
        )

    def _update(self) -> CostPart:
        c, device = self.choices, self.cluster.hardware.device
        away = c.offload & ("optimizer" in self.practice.offloads)
        rate = np.where(away, device.host_bps, device.memory_bps * self.era.memory)
        symbols: dict[str, Array | float] = {
            "params": self.updated_params,
            "update_bytes": self.practice.update_bytes,
            "memory_bps": rate,
        }
        seconds, count = (
            self.updated_params * self.practice.update_bytes / rate,
            server_count(self.sync),
        )
        if count < 2:
            return CostPart(
                TimePart.OPTIMIZER, seconds, "params x update_bytes / memory_bps", symbols
            )
        parts = np.where(c.replicas > 1, count, 1.0)  # each server updates its own
        text = "params / servers x update_bytes / memory_bps"
        return CostPart(TimePart.OPTIMIZER, seconds / parts, text, {**symbols, "servers": parts})

    def memory(self) -> tuple[CostPart, ...]:
        least = replace(self.choices, again=self.again_least)
        return peak_memory(self.work, least, self.practice, self._bubble[1], self.sync)
