"""Seconds that a block takes on one rank for one microbatch: forward, and the two parts of its
backward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from .hardware import Era, Hardware
from .layout_batch import Array, LayoutBatch
from .model_work import BlockWork, Cut, OpWork
from .precision_policy import PrecisionPolicy

NEVER = 1e-2  # of waits, which is none
VECTOR, TILE = 8, 64  # elements of a 16-bit dim that tensor cores need, and that they take best


@dataclass
class BlockSeconds:
    """Of one microbatch: `forward`, `backward` (the input's gradient) and `weight` (the weights');
    `again`: the forward that recomputation repeats, in the backward. `of`: the same forward and
    backward by what limits them."""

    forward: Array
    backward: Array
    weight: Array
    again: Array
    of: dict[str, Array] = field(default_factory=dict)

    @property
    def total(self) -> Array:
        return self.forward + self.backward + self.weight + self.again

    def scaled(self, by: Array | float) -> BlockSeconds:
        """So many times as long."""
        parts = {name: value * by for name, value in self.of.items()}
        return BlockSeconds(
            self.forward * by, self.backward * by, self.weight * by, self.again * by, parts
        )

    def longer(self, times: Array, why: str) -> BlockSeconds:
        """So many times as long, in which a part of its own says why."""
        found = replace(self.scaled(times), of=dict(self.of))
        found.of[why] = (times - 1) * self.total
        return found


def sum_seconds(those: Iterable[BlockSeconds]) -> BlockSeconds:
    """One after the other."""
    first, *rest = those
    total = BlockSeconds(first.forward, first.backward, first.weight, first.again, dict(first.of))
    for one in rest:
        total.forward = total.forward + one.forward
        total.backward = total.backward + one.backward
        total.weight = total.weight + one.weight
        total.again = total.again + one.again
        for name, value in one.of.items():
            total.of[name] = total.of[name] + value if name in total.of else value
    return total


def ranks_dividing(cut: Cut, choices: LayoutBatch) -> Array:
    """Over how many ranks an op is divided, beside those that have other tokens."""
    if cut == "vocabulary":
        return choices.vocabulary_ranks
    features = choices.feature_ranks
    if cut in ("features", "expert"):
        return features
    return np.where(choices.sequence, features, 1) if cut == "sequence" else np.ones_like(features)


def _width_ranks(op: OpWork, choices: LayoutBatch) -> Array:
    """Over how many ranks a matmul's `width` is divided."""
    return choices.vocabulary_ranks if op.cut == "vocabulary" else choices.feature_ranks


def attention_peak(hardware: Hardware, dtype: str) -> float:
    """FLOP/s of a fused attention, which is not computed in 8 bits. Raises ConfigError."""
    return hardware.peak("bf16" if dtype == "fp8" else dtype)


def block_seconds(
    block: BlockWork,
    choices: LayoutBatch,
    hardware: Hardware,
    era: Era,
    practice: PrecisionPolicy,
    ahead: Array,
    behind: Array,
    repeated: Array,
) -> BlockSeconds:
    """Of one block of this kind, with what its forward waits for other ranks, `ahead`, its
    backward, `behind`, and the forward that recomputation repeats, `repeated`.

    A matmul reaches era.matmul x F/(F + matmul_flops) of the peak, F its own FLOPs; what moves data
    a share of the memory's bandwidth; and nothing is sooner than the host launches it. A backward
    is a matmul by the input and one by the weight, of the same FLOPs; of what has no weights, all
    is the input's, and so is the one matmul of a frozen weight.
    """
    dtype, rate = practice.compute, hardware.device.memory_bps * era.memory
    fused = attention_peak(hardware, dtype)
    samples = choices.microbatch / choices.sequences
    zero = np.zeros(len(choices))
    found = dict.fromkeys(("matmul", "attention", "memory"), zero)
    forward, backward, weight, core, launched, core_launched = zero, zero, zero, zero, 0.0, 0.0
    for op in block.ops:
        share = samples / ranks_dividing(op.cut, choices)
        if op.kind == "matmul":
            flops = op.flops * share
            each = flops / (op.matmuls / (choices.experts if op.cut == "expert" else 1.0))
            kind = "bf16" if practice.wide_experts and op.cut == "expert" else dtype
            peak = hardware.peak(kind) * era.matmul
            took = flops / peak * (1 + era.matmul_flops / np.maximum(each, 1.0))
            took = (
                took
                / _fitting(op, _width_ranks(op, choices), era)
                / (era.eight if kind == "fp8" else 1.0)
            )
            first = op.backward if op.core else np.minimum(1.0, op.backward)
            back, own = first * took, (op.backward - first) * took
        elif op.kind == "attention":
            took = op.flops * share / (fused * era.attention)
            back, own = op.backward * op.flops * share / (fused * era.attention_backward), zero
        else:
            took = zero
            back, own = zero, zero
        moved = op.moved_bytes * share * era.traffic / rate
        took, back = took + moved, back + moved * (op.backward if op.kind == "memory" else 1.0)
        forward, backward, weight = forward + took, backward + back, weight + own
        found[op.kind] = found[op.kind] + took + back + own
        launched += op.kernels
        if op.core:
            core, core_launched = core + took, core_launched + op.kernels
    runs_again = choices.again if block.repeated else zero
    again = np.maximum(np.where(choices.selective, core, 0.0), runs_again * forward)
    found["recompute"] = again
    floor = np.full(len(choices), launched * era.launch_s)
    floor = floor + np.where(ahead > 0, block.reductions * era.launch_s, 0.0)
    back, own = _split(backward + behind, weight, floor, era)
    floor_again = floor * runs_again + np.where(
        choices.selective, core_launched * era.launch_s, 0.0
    )
    made = BlockSeconds(
        _host_paced(forward + ahead, floor, era),
        back,
        own,
        _host_paced(again + repeated, floor_again, era),
        found,
    )
    busy = forward + ahead + backward + behind + weight + again + repeated
    found["launch"] = np.maximum(made.total - busy, 0.0)  # rounding may leave less
    return made


def _fitting(op: OpWork, tp: Array, era: Era) -> Array:
    """The share of a matmul's rate that is left if its dims do not fit the device."""
    share = np.ones(len(tp))
    for width, ways in ((op.width, tp), (op.unit, 1)):
        if width:
            share = np.where(
                width % (TILE * ways) > 0,
                np.minimum(share, era.uneven if ways is tp else 1.0),
                share,
            )
            ragged = era.ragged if ways is tp else era.ragged_heads
            share = np.where(width % (VECTOR * ways) > 0, np.minimum(share, ragged), share)
    return share


def _host_paced(took: Array, floor: Array, era: Era) -> Array:
    """Work that the host begins piece by piece, ahead of the device: as long as the longer of both,
    and 1 + era.waits times that where they are equal, for then some kernels end before the next one
    is there. What is much longer hides the other: their norm of order 1 / log2(1 + waits), which is
    the maximum where nothing waits, and the sum where no launch is queued."""
    longer, shorter = np.maximum(took, floor), np.minimum(took, floor)
    if era.waits < NEVER:
        return longer
    order = 1 / np.log2(1 + era.waits)
    if order == 1:
        return longer + shorter
    ratio = shorter / np.where(longer > 0, longer, 1.0)
    return longer * (1 + ratio**order) ** (1 / order)


def _split(backward: Array, weight: Array, floor: Array, era: Era) -> tuple[Array, Array]:
    """A backward launches about twice the kernels of a forward at half the cost of each, as no
    Python runs."""
    whole = backward + weight
    longer = _host_paced(whole, floor, era) / np.where(whole > 0, whole, 1.0)
    return np.where(whole > 0, backward * longer, floor), weight * longer
