"""The most memory that a rank holds at once, in parts. Closed form, over arrays.

Weights, gradients and optimizer state after Rajbhandari et al. 2020 (ZeRO); activations of the
microbatches in flight after Korthikanti et al. 2022, from what each op keeps; the loss's logits;
what one backward needs beside; what the optimizer's step needs in place of these last three; and
what the start needs more than all of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from weft.nn import FEWEST_ROWS, GPU_CHUNK, MOST_CHUNKS
from weft.parallel import (
    EXPERT_AXES,
    FEATURE_AXES,
    HEAD_AXES,
    VOCABULARY_AXES,
)

from .breakdown import CostPart, MemoryPart
from .compute import ranks_dividing
from .hardware import GIB, Era
from .layout_batch import Array, LayoutBatch
from .model_work import BlockWork, Held, ModelWork
from .pipeline_stages import StageShare, splits_backward, stage_shares
from .precision_policy import PrecisionPolicy
from .replica_sync import kept_bytes, server_count

if TYPE_CHECKING:
    from weft.core import Sync

OFFLOADED = (
    MemoryPart.WEIGHTS,
    MemoryPart.GRADIENTS,
    MemoryPart.OPTIMIZER,
    MemoryPart.ACTIVATIONS,
)


def stage_params(
    stage: StageShare, work: ModelWork, choices: LayoutBatch, held: Held = "params"
) -> tuple[Array, Array]:
    """Parameters that a rank of this stage computes with: of experts, and all others. A tied one
    that lies on another rank too is a second copy there. `held`: which of them."""
    many = np.maximum(choices.experts, 1)
    plain, routed = np.zeros(len(choices)), np.zeros(len(choices))
    for block, count in stage.holds(work):
        second = np.where(block.tied & (stage.before * stage.after > 0), 0.0, 1.0)
        for cut, elements in getattr(block, held):
            if cut == "expert":
                routed = routed + count * elements / (choices.feature_ranks * many)
            else:
                plain = plain + second * count * elements / ranks_dividing(cut, choices)
    return routed, plain


def part_params(
    stage: StageShare, work: ModelWork, choices: LayoutBatch, trained: bool = False
) -> tuple[Array, Array]:
    """Parameters of parts with axes of their own, or those of them that are `trained`: how many
    more a rank of this stage stores than if they were sharded as others are, and how many it stores
    unsharded."""
    more, unsharded = np.zeros(len(choices)), np.zeros(len(choices))
    few, many = shard_counts(choices)
    for block, count in stage.holds(work):
        second = np.where(block.tied & (stage.before * stage.after > 0), 0.0, 1.0)
        for part in block.parts:
            elements = second * count * (part.trained if trained else part.elements)
            shards = many
            if part.cut == "expert":
                elements = elements / (choices.feature_ranks * np.maximum(choices.experts, 1))
                shards = few
            else:
                elements = elements / ranks_dividing(part.cut, choices)
            over = np.where(shards > 1, choices.size(*part.axes), 1) if part.axes else 1
            more = more + elements * (1 / over - 1 / shards)
            if not part.axes:
                unsharded = unsharded + elements
    return more, unsharded


def tied_params(stage: StageShare, work: ModelWork, choices: LayoutBatch) -> Array:
    """Trained parameters of this stage that the last one holds too, where these are two ranks."""
    found = np.zeros(len(choices))
    for block in work.blocks:
        if block.tied:
            found = found + sum(
                n / ranks_dividing(cut, choices) for cut, n in block.trained if cut != "expert"
            )
    return found * stage.before * (1 - stage.after)


def shard_counts(choices: LayoutBatch) -> tuple[Array, Array]:
    """Over how many ranks fsdp divides an expert's parameters, and all others."""
    outside = choices.size(*EXPERT_AXES)
    return np.maximum(1, choices.shards / np.maximum(1, choices.experts / outside)), choices.shards


def activation_bytes(block: BlockWork, choices: LayoutBatch, core: bool) -> Array:
    """Bytes that one block keeps of a microbatch for its backward; without `core`, where that is
    done again."""
    samples = choices.microbatch / choices.sequences
    found = np.zeros(len(choices))
    for op in block.ops:
        if core or not op.core:
            found = found + op.saved_bytes * samples / ranks_dividing(op.cut, choices)
    return found


def saved_bytes(block: BlockWork, choices: LayoutBatch, inputs: Array | float = 1.0) -> Array:
    """Bytes that one block, run again or not, saves of a microbatch: the mean of both. `inputs`:
    the share of what blocks that run again save."""
    whole, bare = (activation_bytes(block, choices, core) for core in (True, False))
    kept = np.where(choices.selective, bare, whole)
    if not block.repeated:
        return kept
    again = choices.again * inputs * input_bytes(block, choices)
    return (1 - choices.again) * kept + again


def peak_memory(
    work: ModelWork,
    choices: LayoutBatch,
    practice: PrecisionPolicy,
    live: tuple[Array, Array],
    sync: Sync | None,
) -> tuple[CostPart, ...]:
    """`live`: microbatches whose activations the first and the last rank of a pipeline hold at
    once. Of both, the rank that needs more."""
    first, _, last = stage_shares(work, choices)
    ends = [
        _rank(stage, work, choices, practice, count, sync)
        for stage, count in zip((first, last), live)
    ]
    needs = [sum((part.value for part in end), np.zeros(len(choices))) for end in ends]
    early = needs[0] >= needs[1]
    return tuple(
        CostPart(
            a.name,
            np.where(early, a.value, b.value),
            a.formula,
            _Either(early, a.symbols, b.symbols),
        )
        for a, b in zip(*ends, strict=True)
    )


class _Either(Mapping[str, Array | float]):
    """The symbols of the rank that needs more, worked out when somebody asks."""

    def __init__(
        self, early: Array, first: Mapping[str, Array | float], last: Mapping[str, Array | float]
    ):
        self._early, self._first, self._last = early, first, last

    def __getitem__(self, name: str) -> Array:
        return np.where(self._early, self._first[name], self._last[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._first)

    def __len__(self) -> int:
        return len(self._first)


def communicator_bytes(choices: LayoutBatch, era: Era) -> Array:
    """Bytes of communicators, which no allocator knows of: one for each axis of several ranks, and
    one of all ranks. One of NCCL's takes 544 MB over two A100, 688 MB over more (NVIDIA/nccl issue
    964)."""
    groups = sum((size > 1 for size in choices.sizes.values()), np.zeros(len(choices)))
    return GIB * era.communicator_gib * (groups + (groups > 0))


def input_bytes(block: BlockWork, choices: LayoutBatch) -> Array:
    """Bytes that come into one block, of a microbatch."""
    return (
        block.output_bytes
        * choices.microbatch
        / choices.sequences
        / ranks_dividing("sequence", choices)
    )


def _working_ranks(block: BlockWork, choices: LayoutBatch) -> Array:
    """Over how many ranks what a block's backward needs is divided."""
    ends = block.elements("vocabulary") > 0
    return choices.vocabulary_ranks if ends else choices.feature_ranks


def kv_bytes(block: BlockWork, choices: LayoutBatch) -> Array:
    """Bytes of the keys and values of all ranks of cp, of a microbatch, for the heads of a rank.
    Where the ranks that divide heads are more than key heads, each head goes to several."""
    return (
        block.key_bytes
        * choices.microbatch
        / np.minimum(choices.size(*FEATURE_AXES, *HEAD_AXES), block.kv_heads or 1)
    )


def _logit_bytes(
    work: ModelWork, choices: LayoutBatch, practice: PrecisionPolicy, samples: Array, head: Array
) -> Array:
    """Bytes of a microbatch's logits at the loss: all of them, or a chunk with the sums of the
    head's gradients (`nn/deferred_logits.py`)."""
    ranks = 1 if practice.gathers_logits else choices.vocabulary_ranks
    words, rows = work.vocab / ranks, work.tokens * samples
    chunk = np.minimum(GPU_CHUNK, words * np.maximum(FEWEST_ROWS, rows / MOST_CHUNKS))
    split = np.array([splits_backward(name) for name in choices.schedules])
    whole = words * rows <= practice.few_logits
    if not practice.always_chunks:
        whole = whole | (split[choices.schedule] & (choices.stage_ranks > 1))
    in_chunks = practice.chunk_bytes * np.minimum(chunk, words * rows) + practice.sum_bytes * head
    return np.where(whole, practice.logit_bytes * words * rows, in_chunks)


def whole_at_start(work: ModelWork, choices: LayoutBatch) -> Array:
    """Elements of whole weights that a rank holds at once before the first step, beside its shards.

    It fills its shards from one whole weight at a time: the largest are those outside of the
    repeated blocks. Where features, the vocabulary or experts are divided, `weft train` compares
    the sharded model with the whole one, forward and backward: for that it gathers all that is
    outside of the blocks, and one block at a time. A gradient stands beside: of that block, or of
    one weight outside.
    """
    ends = [b for b in work.blocks if not b.repeated and not b.tied]
    one = max((b.elements() for b in ends), default=0.0)
    block = max((b.elements() for b in work.blocks if b.repeated), default=0.0)
    gathered = sum(b.count * b.elements() for b in ends) + np.maximum(2 * block, one)
    compared = (choices.size(*FEATURE_AXES, *VOCABULARY_AXES) > 1) | (choices.experts > 1)
    return np.where(compared, gathered, one)


def _rank(
    stage: StageShare,
    work: ModelWork,
    choices: LayoutBatch,
    practice: PrecisionPolicy,
    live: Array,
    sync: Sync | None,
) -> tuple[CostPart, ...]:
    routed, plain = stage_params(stage, work, choices)
    few, many = shard_counts(choices)
    more, unsharded = part_params(stage, work, choices)
    full, sharded = routed + plain, routed / few + plain / many + more
    routed, plain = stage_params(stage, work, choices, "in_int8")
    full_int8, sharded_int8 = routed + plain, routed / few + plain / many
    routed, plain = stage_params(stage, work, choices, "trained")
    more, _ = part_params(stage, work, choices, trained=True)
    full_trained, sharded_trained = routed + plain, routed / few + plain / many + more
    away = {name: choices.offload & (name in practice.offloads) for name in OFFLOADED}
    zero3, zero2 = choices.zero >= 3, choices.zero >= 2
    shards = zero3 | practice.shards_weights
    resting = np.where(many > 1, np.where(shards, sharded, full), full)
    int8 = np.where(many > 1, np.where(shards, sharded_int8, full_int8), full_int8)
    graded = np.where((many > 1) & zero2, sharded_trained, full_trained)
    # else they stay here for a step as they were gathered
    resting, int8 = (np.where(away[MemoryPart.WEIGHTS] & shards, 0.0, n) for n in (resting, int8))
    resting = resting - int8
    copied = np.where((many > 1) & zero3, unsharded, full - full_int8)
    graded = np.where(
        away[MemoryPart.GRADIENTS] & zero2, 0.0, graded
    )  # else they are added up here, and then reduced
    trained = np.where(many > 1, sharded_trained, full_trained)
    replicas = choices.replicas
    # of servers, each has the state of its part
    stated = np.where(
        away[MemoryPart.OPTIMIZER],
        0.0,
        trained / np.where(replicas > 1, max(1, server_count(sync)), 1),
    )
    agreed, coded = kept_bytes(sync, practice.reduce_bytes, replicas)
    # a codec of fsdp's reduce-scatters keeps what it does of gradients that are not sharded
    alone = (replicas == 1) & (choices.state_ranks > 1)
    agreed, of = np.where(alone, coded, agreed), np.where(alone, full_trained, trained)
    largest = np.max(
        [
            block.elements("features") + block.elements("whole")
            for block in work.blocks
            if block.repeated
        ]
        or [0.0]
    ) / choices.feature_ranks + np.max([block.elements("expert") for block in work.blocks]) / (
        choices.feature_ranks * np.maximum(choices.experts, 1)
    )
    head = stage.after * work.head / choices.vocabulary_ranks
    unit = largest * work.units.largest / practice.messages
    left = np.zeros(len(choices))
    if work.units.left:
        ends = replace(stage, layers=np.zeros(len(choices)))
        left = work.units.left * (full - sum(stage_params(ends, work, choices)))
    gathered = np.where(
        (many > 1) & zero3,
        np.minimum((1 + practice.ahead) * unit + left, full)
        * (practice.gather_bytes - (practice.gather_bytes - 1) * full_int8 / np.maximum(full, 1.0))
        + (unit + left) * practice.reduce_bytes,
        0.0,
    )

    samples = choices.microbatch / choices.sequences
    activations, once, working, sent, came, blocks = (np.zeros(len(choices)) for _ in range(6))
    for block, count in stage.holds(work):
        whole, bare = (
            activation_bytes(block, choices, True),
            activation_bytes(block, choices, False),
        )
        entry, inputs = input_bytes(block, choices), np.ones(len(choices))
        if block.repeated:
            # of those that rest elsewhere, one is read while the next comes
            inputs = np.where(
                away[MemoryPart.ACTIVATIONS],
                np.minimum(1, 2 / np.maximum(1, choices.again * count)),
                1.0,
            )
            once = np.maximum(
                once,
                np.where(
                    choices.again > 0, whole - entry, np.where(choices.selective, whole - bare, 0)
                ),
            )
        each = saved_bytes(block, choices, inputs)
        if block.repeated and practice.host_activations:
            # the block that runs, and one that leaves or comes; and what came from another stage,
            # which waits for its gradient
            blocks = np.maximum(blocks, np.minimum(2, live * count) * each)
            came = np.maximum(came, np.where(count > 0, entry, 0.0))
        else:
            activations = activations + count * each
        if practice.keeps_sent and block.repeated:
            sent = np.maximum(sent, np.where(count > 0, entry, 0.0))
        # gathered keys and values, and their gradients in float32
        both = np.where(
            choices.gather,
            (1 + max(4, work.itemsize) / work.itemsize) * kv_bytes(block, choices),
            0.0,
        )
        working = np.maximum(
            working,
            np.where(
                count > 0,
                block.working_bytes * samples / _working_ranks(block, choices) + both,
                0.0,
            ),
        )
    # where a V turns, a chunk's stays there; but its first rank, which ends the model too, is the
    # one that needs more
    activations = (
        activations
        + np.where(choices.stage_ranks > 1, choices.chunks - stage.after, 0.0) * sent
        + np.where(choices.stage_ranks > 1, choices.chunks - stage.before, 0.0) * came
    )
    logits = stage.after * _logit_bytes(work, choices, practice, samples, head)
    busy = once + working
    parts = (
        CostPart(
            MemoryPart.WEIGHTS,
            resting * practice.weight_bytes + int8 + copied * practice.copy_bytes,
            "params x weight_bytes + int8 + copied x copy_bytes",
            {
                "params": resting,
                "weight_bytes": practice.weight_bytes,
                "int8": int8,
                "copied": copied,
                "copy_bytes": practice.copy_bytes,
            },
        ),
        CostPart(
            MemoryPart.GATHERED_WEIGHTS,
            gathered,
            "min((1 + ahead) x unit + left, all) x gather_bytes + (unit + left) x reduce_bytes, of"
            " gathered units and one's gradient, left of the blocks in no unit",
            {
                "ahead": practice.ahead,
                "unit": unit,
                "left": left,
                "all": full,
                "gather_bytes": practice.gather_bytes,
                "reduce_bytes": practice.reduce_bytes,
            },
        ),
        CostPart(
            MemoryPart.GRADIENTS,
            graded * practice.grad_bytes,
            "params x grad_bytes",
            {"params": graded, "grad_bytes": practice.grad_bytes},
        ),
        CostPart(
            MemoryPart.DUMMY_GRADIENTS,
            (largest + head) * practice.dummy_bytes,
            "(largest + head) x dummy_bytes, largest of one block",
            {"largest": largest, "head": head, "dummy_bytes": practice.dummy_bytes},
        ),
        CostPart(
            MemoryPart.OPTIMIZER,
            stated * practice.state_bytes,
            "params x state_bytes",
            {"params": stated, "state_bytes": practice.state_bytes},
        ),
        CostPart(
            MemoryPart.AVERAGES,
            trained * practice.average_bytes,
            "params x average_bytes",
            {"params": trained, "average_bytes": practice.average_bytes},
        ),
        CostPart(
            MemoryPart.SYNCHRONISER,
            of * agreed,
            "params x kept_bytes, what replicas keep to agree",
            {"params": of, "kept_bytes": agreed},
        ),
        CostPart(
            MemoryPart.ACTIVATIONS,
            live * activations + blocks,
            "live x microbatch_bytes + two_blocks, what else one keeps, and what two blocks keep"
            if practice.host_activations
            else "live x microbatch_bytes, what blocks keep of one",
            {"live": live, "microbatch_bytes": activations, "two_blocks": blocks},
        ),
        CostPart(
            MemoryPart.WORKING,
            np.maximum(logits, busy + (logits if practice.logits_stay else 0.0)),
            "max(logits, again + temporaries + stay x logits), logits = logit_bytes x vocab x"
            " tokens x b / t, or a chunk of them where they are many",
            {
                "logit_bytes": practice.logit_bytes,
                "vocab": float(work.vocab),
                "tokens": work.tokens,
                "b": stage.after * samples,
                "t": np.where(practice.gathers_logits, 1.0, choices.vocabulary_ranks),
                "logits": logits,
                "again": once,
                "temporaries": working,
                "stay": float(practice.logits_stay),
            },
        ),
    )
    trains = (*parts, _update_part(parts, stated, practice))
    return (*trains, _start_part(trains, whole_at_start(work, choices), resting, int8, practice))


def _update_part(
    training: Sequence[CostPart], updated: Array, practice: PrecisionPolicy
) -> CostPart:
    """What the optimizer's step needs more than a backward, which has activations in its place."""
    gone = sum(
        (p.value for p in training if p.name in (MemoryPart.ACTIVATIONS, MemoryPart.WORKING)),
        np.zeros(len(updated)),
    )
    return CostPart(
        MemoryPart.UPDATE,
        np.maximum(0.0, updated * practice.step_bytes - gone),
        "max(0, params x step_bytes - activations)",
        {"params": updated, "step_bytes": practice.step_bytes, "activations": gone},
    )


def _start_part(
    training: Sequence[CostPart],
    whole: Array,
    resting: Array,
    int8: Array,
    practice: PrecisionPolicy,
) -> CostPart:
    """What the start needs more than training, which holds nothing of it."""
    held = sum((part.value for part in training), np.zeros(len(whole)))
    needed = resting * practice.weight_bytes + int8 + whole * practice.start_bytes
    return CostPart(
        MemoryPart.START,
        np.maximum(0.0, needed - held) if practice.start_bytes else np.zeros(len(whole)),
        "max(0, params x weight_bytes + int8 + whole x start_bytes - training), whole weights at"
        " once",
        {
            "params": resting,
            "int8": int8,
            "weight_bytes": practice.weight_bytes,
            "whole": whole,
            "start_bytes": practice.start_bytes,
            "training": held,
        },
    )
