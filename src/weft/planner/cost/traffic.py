"""Bytes that a rank of the first stage sends in a step, axis by axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from weft.core import (
    STAGE_AXIS,
)
from weft.parallel import (
    EXPERT_AXES,
    HEAD_AXES,
    KEY_AXES,
    VOCABULARY_AXES,
)

from .compute import ranks_dividing
from .layout_batch import Array
from .memory import kv_bytes
from .pipeline_stages import is_v_shaped

if TYPE_CHECKING:
    pass
from .block_cost import reduced_bytes, reducing_axes
from .cost_inputs import CostInputs


def note_traffic(at: CostInputs) -> None:
    """Bytes that a rank of the first stage sends in a step over the axes of the model."""
    c, m, item = at.choices, at.choices.accumulate, at.work.itemsize
    experts = np.maximum(c.experts, 1)
    for block, count in at.stages[0].holds(at.work):
        again = c.again if block.repeated else 0.0
        core = np.where(c.selective, 1.0, again)
        share = m * count * at.samples
        ahead, back = reduced_bytes(at, block)
        passes = 2.0 if block.repeated else np.where(c.sequence, 3, 2)  # as in `_exchanges`
        for axis in reducing_axes(block):
            n = c.sizes[axis]
            at.sent(axis, passes * share * (n - 1) / n * ((1 + again) * ahead + back))
        # keys and values go round, again in backward, and their gradients home, in float32 at
        # least
        own = m * count * kv_bytes(block, c) / c.size(*KEY_AXES)
        for axis in KEY_AXES:
            n = c.sizes[axis]
            home = np.where(c.gather, n - 1, n) * max(4, item) / item
            at.sent(axis, own * np.where(n > 1, (2 + core) * (n - 1) + home, 0.0))
        queries = share / c.feature_ranks * block.query_bytes
        crossing = (2 + core) * (own + queries)
        unused = np.where(c.selective, queries / 2, 0.0)  # what the core gives
        for axis in HEAD_AXES:
            n = c.sizes[axis]
            at.sent(axis, (n - 1) / n * (crossing - unused))
        at.sent(
            EXPERT_AXES[0],
            2 * (2 + again) * share * (experts - 1) / experts * block.routed_bytes,
        )
    if at.work.vocab:  # maxima, sums and targets of the loss
        rows = m * at.samples * at.stages[0].after * at.work.tokens
        for axis in VOCABULARY_AXES:
            n = c.sizes[axis]
            at.sent(axis, 2 * (n - 1) / n * 3 * rows * max(4, item))
    entry = at.work.blocks[0].output_bytes * at.samples / ranks_dividing("sequence", c)
    at.sent(STAGE_AXIS, np.where(c.stage_ranks > 1, m * _messages(at) * entry, 0.0))


def _messages(at: CostInputs) -> Array:
    """Values and gradients that the first rank sends to others for a microbatch."""
    c, found = at.choices, np.zeros(len(at.choices))
    for place, name in enumerate(c.schedules):
        here = c.schedule == place
        if here.any():
            found = np.where(here, c.chunks if is_v_shaped(name) else 2 * c.chunks - 1, found)
    return found
