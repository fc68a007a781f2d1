"""How much longer layers of some shapes took in measured runs than an era's constants say.

Constants hold for all shapes, and no few of them say that one width on four ranks is slower than on
two. Runs that were measured do, of that shape and what is near it: a kernel regression (Nadaraya
1964, Watson 1964) of what is left.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .hardware import LayerTiming
from .layout_batch import Array, LayoutBatch
from .model_work import BlockWork, ModelWork

MEASURED = "as measured"  # the part of a step that it is
NEAR = 0.25  # octaves from a layer at which it tells three fifths of what it tells of its own shape
LEAST = 1e-3  # of a change that is no change


def layer_shapes(work: ModelWork, block: BlockWork, choices: LayoutBatch) -> Array:
    """Of each choice the logarithms, base 2, of a forward's FLOPs for a sample, of its tokens, of
    samples that a rank has in a microbatch, and of ranks of tp. Shape (choices, 4)."""
    one = np.ones(len(choices))
    flops = max(1.0, sum(op.flops for op in block.ops))
    sizes = (
        flops * one,
        work.tokens * one,
        choices.microbatch / choices.sequences,
        choices.feature_ranks,
    )
    return np.log2(np.stack(sizes, axis=1))


def main_layer_shape(work: ModelWork, choices: LayoutBatch) -> Array | None:
    """The shape of those layers that most of a model's FLOPs are of; None if none of its blocks is
    repeated."""
    layers = [block for block in work.blocks if block.repeated]
    if not layers:
        return None
    return layer_shapes(
        work,
        max(layers, key=lambda block: block.count * sum(op.flops for op in block.ops)),
        choices,
    )


def layer_factor(layers: Sequence[LayerTiming], at: Array) -> Array:
    """How many times as long as constants say a layer of each shape takes: 1 far from all
    `layers`."""
    few, which = np.unique(at, axis=0, return_inverse=True)
    there = np.log2([[one.flops, one.tokens, one.samples, one.tp] for one in layers])
    near = np.exp(-((few[:, None] - there) ** 2).sum(axis=2) / (2 * NEAR**2))
    took = near @ np.log([one.took for one in layers]) / np.maximum(1.0, near.sum(axis=1))
    return np.exp(np.where(np.abs(took) < LEAST, 0.0, took))[which.ravel()]
