"""Estimate: time, memory and traffic of many choices at once, each as named parts that sum to it.

A step is m microbatches on the slowest stage, the pipeline's idle time, its messages, the sums of gradients that
compute does not hide, the optimizer, and what goes with no size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from .. import schedule
from ..costs import Costs
from ..layout import DATA_AXES, SEQUENCE_AXES
from .agreement import agreement
from .chain import Stage, parts, stages
from .choices import Array, Choices
from .compute import Seconds, seconds, summed, ways
from .hardware import GIB, Cluster, Era
from .memory import held, peak, shards
from .network import Group, Network
from .parts import Part
from .practice import Practice
from .work import Block, Work

if TYPE_CHECKING:
    from ..syncs import Sync


@dataclass(frozen=True)
class Estimate:
    """Of each choice: seconds of a step and bytes of a rank's peak, in parts; `reserved_bytes`: with what the allocator
    and the driver keep for themselves; bytes that a rank sends over each axis in a step; `mfu` by the model's
    definition; whether it fits, or by how many bytes it does not."""

    time: tuple[Part, ...]
    memory: tuple[Part, ...]
    traffic: Mapping[str, Array]
    step_s: Array
    peak_bytes: Array
    reserved_bytes: Array
    fits: Array
    over_bytes: Array
    mfu: Array
    tokens_per_s: Array


def estimate(
    work: Work, choices: Choices, cluster: Cluster, era: Era, practice: Practice, sync: Sync | None = None
) -> Estimate:
    """Prices every choice, about a million of them in ten seconds. Raises ConfigError for a dtype without a peak."""
    priced = Priced(work, choices, cluster, era, practice, sync)
    time, memory = priced.time(), priced.memory()
    zero = np.zeros(len(choices))
    step = sum((part.value for part in time), zero)
    held_bytes = sum((part.value for part in memory), zero)
    reserved = held_bytes * era.reserved + era.context_gib * GIB
    # the allocator gives back what it has to spare before it fails
    over = held_bytes + (era.context_gib - cluster.hardware.device.memory_gib) * GIB
    peak_flops = cluster.hardware.peak(practice.compute) * choices.world
    return Estimate(
        time, memory, priced.traffic, step, held_bytes, reserved, over <= 0, np.maximum(over, 0.0),
        mfu=work.model_flops * choices.batch / (step * peak_flops), tokens_per_s=work.tokens * choices.batch / step,
    )  # fmt: skip


def stage_costs(work: Work, choices: Choices, index: int, cluster: Cluster, era: Era, practice: Practice) -> Costs:
    """What `simulate` asks of one choice: seconds of each stage of its pipeline for a microbatch."""
    one = choices.take(np.array([index]))
    priced = Priced(work, one, cluster, era, practice, None)
    p, v = int(one.sizes["pp"][0]), int(one.chunks[0])
    count = p * v
    first, between, last = stages(work, one)
    layers = [between.layers[0] / v] * count
    layers[0], layers[-1] = first.layers[0] / v, last.layers[0] / v
    total = sum(layers) or 1.0
    found = []
    for index, share in enumerate(layers):
        ends = (np.ones(1) * (index == 0), np.ones(1) * (index == count - 1))
        found.append(priced.rank(Stage(np.array([share / total]), *ends)).seconds)
    return Costs(
        forward_s=tuple(float(s.forward[0]) for s in found),
        backward_s=tuple(float(s.backward[0] + s.again[0]) for s in found),
        weight_s=tuple(float(s.weight[0]) for s in found),
        comm_s=float(priced.message_s[0]),
    )


@dataclass
class Carried:
    """What one rank does for one microbatch: `seconds` in all, which it computes and waits for `waits` by axis."""

    seconds: Seconds
    waits: dict[str, Array]

    def scaled(self, by: Array | float) -> Carried:
        """So many times as long."""
        return Carried(self.seconds.scaled(by), {axis: value * by for axis, value in self.waits.items()})


def added(those: Sequence[Carried]) -> Carried:
    """One after the other."""
    waits: dict[str, Array] = {}
    for one in those:
        for axis, value in one.waits.items():
            waits[axis] = waits[axis] + value if axis in waits else value
    return Carried(summed(one.seconds for one in those), waits)


class Priced:
    """The pieces of an estimate; each is worked out once."""

    def __init__(self, work: Work, choices: Choices, cluster: Cluster, era: Era, practice: Practice, sync: Sync | None):
        self.work, self.choices, self.cluster = work, choices, cluster
        self.era, self.practice, self.sync = era, practice, sync
        self.network = Network(cluster, era)
        self.traffic: dict[str, Array] = {}
        self._samples = choices.microbatch / choices.sequences
        self._blocks = [(block, self._block(block)) for block in work.blocks]

    # ---- one microbatch ----------------------------------------------------------------------------------------------

    def _block(self, block: Block) -> Carried:
        """Compute and the exchanges that it waits for, within one block."""
        exchanges, zero = self._exchanges(block), np.zeros(len(self.choices))
        ahead, behind = (sum((each[side] for each in exchanges.values()), zero) for side in (0, 1))
        found = seconds(block, self.choices, self.cluster.hardware, self.era, self.practice.compute, ahead, behind)
        again = self.choices.again if block.repeated else 0.0
        return Carried(found, {axis: (1 + again) * one + other for axis, (one, other) in exchanges.items()})

    def _exchanges(self, block: Block) -> dict[str, tuple[Array, Array]]:
        """Axis -> seconds that the forward of a block waits for it, and its backward."""
        c, net, found = self.choices, self.network, {}
        tp = c.sizes["tp"]
        if block.reductions and (tp > 1).any():
            group = net.group(c, "tp")
            nbytes = block.reduced_bytes * self._samples / block.reductions
            both = net.gather_s(nbytes, group) + net.gather_s(nbytes, group, "reduce_scatter")
            once = np.where(c.sequence, both, net.reduce_s(nbytes, group))
            found["tp"] = (block.reductions * once, block.reductions * once)
        share = self._samples / tp
        if block.key_bytes and (c.sizes["cp"] > 1).any():
            size = c.sizes["cp"]
            turn = net.send_s(block.key_bytes * share, c, "cp")
            attention = sum(op.flops for op in block.ops if op.kind == "attention") * share
            rate = self.cluster.hardware.peak(self.practice.compute) * self.era.attention
            steps = size - 1
            forward = steps * np.maximum(0.0, turn - attention / size / rate) + np.where(size > 1, 0.1 * turn, 0.0)
            found["cp"] = (forward, 2 * forward)
        if block.key_bytes and (c.sizes["up"] > 1).any():
            once = net.exchange_s((block.query_bytes + block.key_bytes) * share, net.group(c, "up"))
            found["up"] = (once, once)
        if block.routed_bytes and (c.experts > 1).any():
            divided = np.where(c.sequence, tp, 1)
            once = 2 * net.exchange_s(block.routed_bytes * self._samples / divided, self._experts())
            found["ep"] = (once, once)
        return found

    def _experts(self) -> Group:
        """The ranks over which experts are spread: of all that have other tokens, those nearest."""
        everyone = self.network.group(self.choices, *DATA_AXES)
        size = np.maximum(self.choices.experts, 1).astype(float)
        return Group(size, tuple(np.minimum(size, inside) for inside in everyone.inside))

    @cached_property
    def _thirds(self) -> tuple[Carried, Carried, Carried]:
        """What is before the repeated blocks, these, and what is after, each as a whole."""
        before, repeated, _ = parts(self.work)
        ends = len(before), len(before) + len(repeated)
        cuts = (self._blocks[: ends[0]], self._blocks[ends[0] : ends[1]], self._blocks[ends[1] :])
        first, among, last = ([carried.scaled(block.count) for block, carried in those] for those in cuts)
        nothing = self._blocks[0][1].scaled(0.0)
        return added(first or [nothing]), added(among or [nothing]), added(last or [nothing])

    def rank(self, stage: Stage) -> Carried:
        """All blocks of one rank of a stage."""
        before, repeated, after = self._thirds
        return added([before.scaled(stage.before), repeated.scaled(stage.layers), after.scaled(stage.after)])

    @cached_property
    def _stages(self) -> tuple[Stage, Stage, Stage]:
        return stages(self.work, self.choices)

    @cached_property
    def _slowest(self) -> tuple[Carried, Array]:
        """What the stage that sets the pace does for a microbatch; and seconds of a stage in the mean."""
        before, repeated, after = (third.seconds.total for third in self._thirds)
        totals = [s.before * before + s.layers * repeated + s.after * after for s in self._stages]
        first, between, last = self._stages
        ahead, late = totals[0] >= totals[2], np.maximum(totals[0], totals[2]) < totals[1]
        slow = Stage(*(
            np.where(late, m, np.where(ahead, f, e))
            for f, m, e in zip(
                (first.layers, first.before, first.after), (between.layers, between.before, between.after),
                (last.layers, last.before, last.after), strict=True,
            )
        ))  # fmt: skip
        p = self.choices.sizes["pp"]
        several = totals[0] + totals[2] + np.maximum(p - 2, 0) * totals[1]
        return self.rank(slow), np.where(p > 1, several, totals[0]) / p

    @cached_property
    def message_s(self) -> Array:
        """Seconds of one message between stages."""
        entry = next(block for block in self.work.blocks).output_bytes
        tp = self.choices.sizes["tp"]
        parted = tp if self.practice.scatters else ways("sequence", self.choices)
        return self.network.send_s(entry * self._samples / parted, self.choices, "pp")

    # ---- a step ------------------------------------------------------------------------------------------------------

    def time(self) -> tuple[Part, ...]:
        c, era = self.choices, self.era
        m, p, v = c.accumulate, c.sizes["pp"], c.chunks
        slow, mean = self._slowest
        found = [
            Part(kind, m * value, f"m x the slowest stage's {kind}", {"m": m, "microbatch_s": value})
            for kind, value in slow.seconds.of.items()
        ]
        found += [
            Part(f"{axis} exposed", m * value, f"m x a microbatch's wait for {axis}", {"m": m, "microbatch_s": value})
            for axis, value in slow.waits.items()
        ]
        whole = slow.seconds.total
        share = np.where(whole > 0, (p * mean - whole) / np.where(p > 1, p - 1, 1) / np.where(whole > 0, whole, 1), 0.0)
        s = slow.seconds
        scaled = [np.maximum(share, 0.0) * value for value in (s.forward, s.backward + s.again, s.weight)]
        idle, live = self._idle(scaled)
        self._live = live
        found.append(
            Part("bubble", idle, "what the schedule waits: its closed form over p, m, v and F, B, W of a stage",
                 {"p": p, "m": m, "v": v, "F": scaled[0], "B": scaled[1], "W": scaled[2]})
        )  # fmt: skip
        messages = np.where(p > 1, 2 * v * (m + p - 2), 0)
        found.append(
            Part("pp exposed", messages * self.message_s, "2 v (m + p - 2) x seconds of a message",
                 {"p": p, "m": m, "v": v, "message_s": self.message_s})
        )  # fmt: skip
        found += self._gradients(slow.seconds)
        found += self._update()
        found.append(Part("fixed", np.full(len(c), era.fixed_s), "fixed_s of the era", {"fixed_s": era.fixed_s}))
        if era.jitter:
            total = sum((part.value for part in found), np.zeros(len(c)))
            nodes = np.maximum(1, c.world / self.cluster.hardware.node)
            found.append(
                Part("stragglers", era.jitter * np.sqrt(np.log2(nodes)) * total, "jitter x sqrt(log2(nodes)) x rest",
                     {"jitter": era.jitter, "nodes": nodes})
            )  # fmt: skip
        self._note_traffic()
        return tuple(found)

    def _idle(self, costs: Sequence[Array]) -> tuple[Array, tuple[Array, Array]]:
        c = self.choices
        idle, first, last = np.zeros(len(c)), np.ones(len(c)), np.ones(len(c))
        for place, name in enumerate(c.schedules):
            here = c.schedule == place
            if not here.any():
                continue
            brief = schedule.brief(name)(c.sizes["pp"], c.accumulate, c.chunks, *costs)
            idle, first, last = (np.where(here, new, old) for new, old in zip(brief, (idle, first, last), strict=True))
        alone = c.sizes["pp"] == 1
        return np.where(alone, 0.0, idle), (np.where(alone, 1.0, first), np.where(alone, 1.0, last))

    def _gradients(self, slow: Seconds) -> list[Part]:
        """Sums of gradients over data axes, and gathers of sharded weights, as far as compute does not hide them."""
        c, net, practice = self.choices, self.network, self.practice
        routed, plain = held(self._stages[0], self.work, c)
        few, _ = shards(c)
        m, zero = c.accumulate, np.zeros(len(c))
        back, forth = slow.backward + slow.weight + slow.again, slow.forward
        inner = net.group(c, "fsdp", *SEQUENCE_AXES)
        outer = net.group(c, "dp")
        over = c.size("fsdp", *SEQUENCE_AXES)
        sharded, zero3 = c.sizes["fsdp"] > 1, (c.sizes["fsdp"] > 1) & (c.zero >= 3)
        every = np.where(sharded & (c.zero >= 2), m, 1)

        reduced = (plain + np.where(few > 1, routed, 0.0)) * practice.reduce_bytes
        gathered = (plain + np.where(few > 1, routed, 0.0)) * practice.gather_bytes
        units = 1 + practice.messages * self._stages[0].layers * self.work.depth
        scatter = np.where(sharded, net.gather_s(reduced, inner, "reduce_scatter", units), 0.0)
        sums = np.where(~sharded & (over > 1), net.reduce_s(reduced, inner), 0.0)
        last = agreement(net, outer, np.where(sharded, plain / over, plain), practice.reduce_bytes, self.sync)
        self.traffic["dp"] = last.sent_bytes
        wire = (over - 1) / over
        self.traffic["fsdp"] = np.where(sharded, wire * (every * reduced + gathered), 0.0)
        found = []

        def part(name: str, comm: Array, hides: Array, times: Array | int, text: str) -> None:
            hidden = np.minimum(self.era.hidden * comm, hides) if practice.overlaps else zero
            exposed = times * (comm - hidden + self.era.contention * hidden)
            found.append(Part(name, exposed, text, {"times": times + zero, "comm_s": comm, "hidden_s": hidden}))

        text = "times x (comm - hidden + contention x hidden)"
        part("dp exposed", last.seconds + sums, back, 1, text)
        if sharded.any():
            weights = np.where(sharded, net.gather_s(gathered, inner, count=units), 0.0)
            part("fsdp reduce exposed", scatter, back, every, text)
            part("fsdp gather exposed", np.where(zero3, 0.0, weights), np.where(zero3, 0.0, forth), 1, text)
            if zero3.any():
                per_block = 1.0 / max(1, self.work.depth)
                part("fsdp forward gather exposed", np.where(zero3, weights, 0.0), forth * (1 - per_block), m, text)
                part("fsdp backward gather exposed", np.where(zero3, weights, 0.0),
                     np.maximum(back - self.era.hidden * scatter, 0.0), m, text)  # fmt: skip
                self.traffic["fsdp"] = np.where(
                    zero3, wire * (every * reduced + 2 * m * gathered), self.traffic["fsdp"]
                )
        return found

    def _update(self) -> list[Part]:
        c, device = self.choices, self.cluster.hardware.device
        routed, plain = held(self._stages[0], self.work, c)
        few, many = shards(c)
        own = np.where(many > 1, routed / few + plain / many, routed + plain)
        rate = device.memory_bps * self.era.memory
        there = np.where(
            c.offload, own * (self.practice.weight_bytes + self.practice.grad_bytes) / device.host_bps, 0.0
        )
        took = own * self.practice.update_bytes / np.where(c.offload, device.host_bps, rate) + there
        update = Part("optimizer", took, "params of a rank x update_bytes / memory_bps",
                      {"params": own, "update_bytes": self.practice.update_bytes, "memory_bps": rate})  # fmt: skip
        if not self.practice.added_bytes:
            return [update]
        full = routed + plain
        added = Part(
            "accumulation", c.accumulate * full * self.practice.added_bytes / rate, "m x params x added_bytes / memory_bps",
            {"m": c.accumulate, "params": full, "added_bytes": self.practice.added_bytes, "memory_bps": rate},
        )  # fmt: skip
        return [added, update]

    def memory(self) -> tuple[Part, ...]:
        return peak(self.work, self.choices, self.practice, self._live)

    def _note_traffic(self) -> None:
        """Bytes that a rank of the first stage sends in a step over the axes of the model."""
        c, m = self.choices, self.choices.accumulate
        tp, up = c.sizes["tp"], c.sizes["up"]
        zero = np.zeros(len(c))
        sent = {"tp": zero, "cp": zero, "up": zero, "ep": zero}
        for block, count in self._stages[0].holds(self.work):
            again = 2.0 + (c.again if block.repeated else 0.0)
            share = m * count * self._samples
            sent["tp"] = sent["tp"] + again * share * 2 * (tp - 1) / tp * block.reduced_bytes
            sent["cp"] = sent["cp"] + 3 * share / tp * (c.sizes["cp"] - 1) * block.key_bytes
            sent["up"] = sent["up"] + again * share / tp * (up - 1) / up * (block.query_bytes + block.key_bytes)
            experts = np.maximum(c.experts, 1)
            sent["ep"] = sent["ep"] + 2 * again * share * (experts - 1) / experts * block.routed_bytes
        entry = self.work.blocks[0].output_bytes * self._samples / ways("sequence", c)
        sent["pp"] = np.where(c.sizes["pp"] > 1, m * c.chunks * entry, 0.0)
        self.traffic |= sent
