"""What the first, the last and the middle stages of a pipeline hold, in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

from weft.pipeline import schedules

from .layout_batch import Array, LayoutBatch
from .model_work import BlockWork, ModelWork


@dataclass(frozen=True)
class StageShare:
    """Of each choice: how many of the repeated blocks a rank holds, over all of them; and whether
    (0 or 1) it has what is before and after these."""

    layers: Array
    before: Array
    after: Array

    def holds(self, work: ModelWork) -> Sequence[tuple[BlockWork, Array]]:
        """Blocks, and how many of each a rank of it has."""
        before, repeated, after = chain_parts(work)
        return [
            *((block, block.count * self.before) for block in before),
            *((block, block.count * self.layers) for block in repeated),
            *((block, block.count * self.after) for block in after),
        ]


def chain_parts(work: ModelWork) -> tuple[list[BlockWork], list[BlockWork], list[BlockWork]]:
    """What is before the repeated blocks, these, and what is after; what stands between two of them
    is theirs."""
    places = [i for i, block in enumerate(work.blocks) if block.repeated] or [
        0,
        len(work.blocks) - 1,
    ]
    first, last = places[0], places[-1]
    return (
        list(work.blocks[:first]),
        list(work.blocks[first : last + 1]),
        list(work.blocks[last + 1 :]),
    )


def recomputed_share(work: ModelWork, choices: LayoutBatch) -> tuple[Array, Array]:
    """Of a rank's repeated blocks the share that runs again, where every k-th of the model does: of
    the rank that has the most of these; and so that what is left is what the rank keeps that keeps
    the most. Another share is that of every rank."""
    again = choices.again
    some = (again > 0) & (again < 1) & (work.depth > 0)
    some &= np.isclose(1 / np.where(some, again, 1), np.rint(1 / np.where(some, again, 1)))
    if not some.any():
        return again, again
    p, v = choices.stage_ranks, np.where(choices.stage_ranks > 1, choices.chunks, 1)
    folded = np.array([is_v_shaped(name) for name in choices.schedules])[choices.schedule] & (p > 1)
    every = np.rint(1 / np.where(some, again, 1)).astype(np.int64)
    keys = (((p.astype(np.int64) << 16) + v.astype(np.int64) << 16) + every << 1) + folded
    found, place = np.unique(keys[some], return_inverse=True)
    counts = [
        _deal_recomputed(k >> 33, (k >> 17) & 0xFFFF, (k >> 1) & 0xFFFF, bool(k & 1), work.depth)
        for k in found.tolist()
    ]
    repeated, kept = np.array(counts, dtype=float)[place].T
    first, between, _ = stage_shares(work, choices)
    layers = work.depth * np.where(p > 2, between.layers, first.layers)[some]
    most, least = again.astype(float), again.astype(float)
    most[some] = np.minimum(1.0, repeated / np.maximum(layers, 1.0))
    least[some] = np.maximum(0.0, 1.0 - kept / np.maximum(work.depth * first.layers[some], 1.0))
    return most, least


@cache
def _deal_recomputed(
    ranks: int, chunks: int, every: int, folded: bool, depth: int
) -> tuple[int, int]:
    """Of blocks dealt out evenly to all stages, the most that one rank runs again, and the most
    that one keeps."""
    count = ranks * chunks
    bounds = [stage * depth // count for stage in range(count + 1)]
    again, kept = [0] * ranks, [0] * ranks
    for stage, (begin, end) in enumerate(pairwise(bounds)):
        chunk, rank = divmod(stage, ranks)
        rank = ranks - 1 - rank if folded and chunk % 2 else rank
        several = -(-end // every) - -(-begin // every)
        again[rank] += several
        kept[rank] += end - begin - several
    return max(again), max(kept)


@cache
def is_v_shaped(name: str) -> bool:
    """Whether stages of this schedule go down the ranks and come back. Raises ConfigError for an
    unknown name."""
    return schedules.make_schedule(name, 2, 1).placement[:4] == (0, 1, 1, 0)


@cache
def splits_backward(name: str) -> bool:
    """Whether backward comes in two parts, B and W, in this schedule. Raises ConfigError for an
    unknown name."""
    order = schedules.make_schedule(name, 2, 1).order
    return any(action.kind == "W" for actions in order for action in actions)


def stage_shares(
    work: ModelWork, choices: LayoutBatch
) -> tuple[StageShare, StageShare, StageShare]:
    """The first rank of the pipeline, one between, and the last. Blocks are dealt out evenly; where
    they do not divide, the ends, which have more to do, hold one less. Of a V, the first rank has
    both ends of the model."""
    p, depth = choices.stage_ranks, max(1, work.depth)
    each = p * choices.chunks
    even = (depth % each == 0) | (work.depth == 0)  # what has no repeated blocks is dealt out whole
    most = np.where(even, depth / p, np.ceil((depth + 2) / each) * choices.chunks)
    least = np.where(even, most, np.maximum(most - 1, 0))
    one, none, whole = np.ones(len(choices)), np.zeros(len(choices)), p == 1
    ends = np.where(whole, 1.0, least / depth)
    folded = np.array([is_v_shaped(name) for name in choices.schedules])[choices.schedule]
    return (
        StageShare(ends, one, np.where(whole | folded, 1.0, 0.0)),
        StageShare(
            np.where(whole, 1.0, most / depth),
            np.where(whole, 1.0, none),
            np.where(whole, 1.0, none),
        ),
        StageShare(ends, np.where(whole, 1.0, 0.0), np.where(whole | ~folded, 1.0, 0.0)),
    )
