"""Attention masks of transformers under context parallelism: the rule of a mask instead of its
matrix."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from .sequence import ContextParallel


@contextmanager
def mask_rules(sequence: ContextParallel) -> Iterator[None]:
    """Within this context transformers asks `sequence` for each mask of
    `scaled_dot_product_attention`.

    Uses the local override of transformers' mask interface, and takes it back at the end.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None:  # no model of transformers can be running
        yield
        return

    def rule(batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> Tensor | None:
        return sequence.rule(batch_size, q_length, **kwargs)

    interface = masks.ALL_MASK_ATTENTION_FUNCTIONS
    before, shared = interface["sdpa"], type(interface)()["sdpa"]  # a new one has no overrides
    interface["sdpa"] = rule
    try:
        yield
    finally:
        if before is shared:
            del interface["sdpa"]
        else:
            interface["sdpa"] = before
