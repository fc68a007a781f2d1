"""Layers: how much longer than an era's constants say layers of some shapes took, where runs tell.

Constants hold for all shapes, and no few of them say that one width on four ranks is slower than on two. Runs that were
measured do, of that shape and what is near it: a kernel regression (Nadaraya 1964, Watson 1964) of what is left.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .choices import Array, Choices
from .hardware import Layer
from .work import Block, Work

NEAR = 0.35  # octaves of FLOPs, of samples or of ranks, at which a layer tells three fifths of what it tells of its own


def shapes(block: Block, choices: Choices) -> Array:
    """Of each choice the logarithms, base 2, of a forward's FLOPs for a sample, of samples that a rank has in a
    microbatch, and of ranks of tp. Shape (choices, 3)."""
    flops = np.full(len(choices), max(1.0, sum(op.flops for op in block.ops)))
    return np.log2(np.stack([flops, choices.microbatch / choices.sequences, choices.sizes["tp"]], axis=1))


def of_most(work: Work, choices: Choices) -> Array:
    """The shape of those layers that most of a model's FLOPs are of."""
    layers = [block for block in work.blocks if block.repeated] or list(work.blocks)
    return shapes(max(layers, key=lambda block: block.count * sum(op.flops for op in block.ops)), choices)


def times(layers: Sequence[Layer], at: Array) -> Array:
    """How many times as long as constants say a layer of each shape takes: 1 far from all `layers`."""
    there = np.log2([[one.flops, one.samples, one.tp] for one in layers])
    runs = np.array([one.runs for one in layers])
    apart = sum((at[:, None, dim] - there[None, :, dim]) ** 2 for dim in range(3))
    trust = np.exp(-apart / (2 * NEAR**2)) * runs / (runs + 1)
    return np.exp(trust @ np.log([one.took for one in layers]) / np.maximum(1.0, trust.sum(axis=1)))
