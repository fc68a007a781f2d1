"""What a rank computes and waits for within one block, of a microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from weft.parallel import (
    EXPERT_AXES,
    FEATURE_AXES,
    HEAD_AXES,
    KEY_AXES,
    SEQUENCE_AXES,
    VOCABULARY_AXES,
)

from .compute import BlockSeconds, attention_peak, block_seconds, sum_seconds
from .layer_correction import MEASURED, layer_factor, layer_shapes
from .layout_batch import Array
from .memory import kv_bytes
from .model_work import BlockWork

if TYPE_CHECKING:
    pass
from .cost_inputs import CostInputs


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


def reducing_axes(block: BlockWork) -> tuple[str, ...]:
    """The axes over which a block's activations are summed."""
    return VOCABULARY_AXES if block.elements("vocabulary") else FEATURE_AXES


def block_cost(at: CostInputs, block: BlockWork) -> BlockCost:
    """Compute and the exchanges that it waits for, within one block."""
    c, zero = at.choices, np.zeros(len(at.choices))
    again = c.again if block.repeated else zero
    core = np.where(c.selective, 1.0, again)  # what attention's core waits for comes again with it
    waits = {
        axis: (one, other, (core if axis in SEQUENCE_AXES else again) * one)
        for axis, (one, other) in _exchanges(at, block).items()
    }
    sides = (sum((each[side] for each in waits.values()), zero) for side in range(3))
    found = block_seconds(block, c, at.cluster.hardware, at.era, at.practice, *sides)
    if at.era.layers and block.repeated:
        found = found.longer(layer_factor(at.era.layers, layer_shapes(at.work, block, c)), MEASURED)
    return BlockCost(found, {axis: sum(each, zero) for axis, each in waits.items()})


def _exchanges(at: CostInputs, block: BlockWork) -> dict[str, tuple[Array, Array]]:
    """Axis -> seconds that the forward of a block waits for it, and its backward."""
    c, net, found = at.choices, at.network, {}
    ahead, back = reduced_bytes(at, block)
    for axis in reducing_axes(block) if ahead or back else ():
        if not (c.sizes[axis] > 1).any():
            continue
        group, count = net.group(c, axis), max(1.0, block.reductions)
        nbytes = max(ahead, back) * at.samples / count
        pair = net.gather_s(nbytes, group) + net.gather_s(nbytes, group, "reduce_scatter")
        whole = net.reduce_s(nbytes, group)
        # outside of the blocks the sequence is whole, and where they begin or end it is parted
        # or gathered
        once = count * np.where(c.sequence, pair if block.repeated else whole + pair / 2, whole)
        found[axis] = (once * (ahead > 0), once * (back > 0))
    head = ahead == 0 and back > 0
    for axis in VOCABULARY_AXES if head and at.practice.gathers_logits else ():
        logits = at.work.vocab * at.work.tokens * at.work.itemsize * at.samples
        once, before = net.gather_s(logits, net.group(c, axis)), found.get(axis)
        found[axis] = (once, before[1] if before else np.zeros(len(c)))
    share = at.samples / c.feature_ranks
    for axis in KEY_AXES if block.key_bytes else ():
        if (c.sizes[axis] > 1).any():
            found[axis] = _keys(at, block, axis)
    for axis in HEAD_AXES if block.key_bytes else ():
        if (c.sizes[axis] > 1).any():
            nbytes = (block.query_bytes + block.key_bytes) * share
            once = net.exchange_s(nbytes, net.group(c, axis))
            found[axis] = (once, once)
    if block.routed_bytes and (c.experts > 1).any():
        once = 2 * net.exchange_s(block.routed_bytes * at.samples, at.expert_group())
        found[EXPERT_AXES[0]] = (once, once)
    return found


def _keys(at: CostInputs, block: BlockWork, axis: str) -> tuple[Array, Array]:
    """Seconds that attention's forward waits for keys and values of other ranks of cp, and its
    backward: round a ring beside it, or gathered before it, and gradients brought home."""
    c, net, size = at.choices, at.network, at.choices.sizes[axis]
    whole = kv_bytes(block, c)
    turn = net.send_s(whole / size, c, axis)
    attention = (
        sum(op.flops for op in block.ops if op.kind == "attention") * at.samples / c.feature_ranks
    )
    rate = attention_peak(at.cluster.hardware, at.practice.compute) * at.era.attention
    steps = size - 1
    forward = steps * np.maximum(0.0, turn - attention / size / rate) + np.where(
        size > 1, 0.1 * turn, 0.0
    )
    if not c.gather.any():
        return forward, 2 * forward
    item, group, both = at.work.itemsize, net.group(c, axis), 2  # keys, and values
    once = net.gather_s(whole, group, count=both)
    home = net.gather_s(whole * max(4, item) / item, group, "reduce_scatter", both)
    return np.where(c.gather, once, forward), np.where(c.gather, once + home, 2 * forward)


def reduced_bytes(at: CostInputs, block: BlockWork) -> tuple[float, float]:
    """Bytes of activations that tp sums in a block's forward, and in its backward: tokens,
    which an embedding reads, have no gradient, and of a head whose logits stay divided only
    what it reads has one to sum."""
    if block.repeated or block.reductions:
        return block.reduced_bytes, block.reduced_bytes if block.repeated else 0.0
    head = at.work.vocab and any(op.kind == "matmul" and op.cut == "vocabulary" for op in block.ops)
    return 0.0, at.work.blocks[0].output_bytes if head else 0.0
