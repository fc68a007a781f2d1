"""The interfaces by which models of transformers ask for a mask and for attention, in the hands of
weft: the rule of a mask instead of its matrix, and eager attention over parts of the sequence.

Both are taken back at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from .sequence import ContextParallel

_MASKS = "transformers.masking_utils"


def makes_a_mask(frame: FrameType) -> bool:
    """Whether code of transformers that makes masks of attention runs here."""
    return frame.f_globals.get("__name__") == _MASKS


@contextmanager
def mask_rules(sequence: ContextParallel) -> Iterator[None]:
    """Within this context transformers asks `sequence` for each mask of attention, where ranks have
    parts of what runs. By the local override of transformers' mask interface."""
    masks = sys.modules.get(_MASKS)
    if masks is None:  # no model of transformers can be running
        yield
        return
    interface = masks.ALL_MASK_ATTENTION_FUNCTIONS
    shared = type(interface)()  # a new one has no overrides
    before = {kind: interface[kind] for kind in ("sdpa", "eager")}

    def rule(batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> Tensor | None:
        if not sequence.masks_a_part(q_length):
            found: Tensor | None = before["sdpa"](
                batch_size=batch_size, q_length=q_length, kv_length=kv_length, **kwargs
            )
            return found
        return sequence.rule(batch_size, q_length, **kwargs)

    def added_rule(*, q_length: int, dtype: torch.dtype, **kwargs: Any) -> Tensor | None:
        if not sequence.masks_a_part(q_length):
            found: Tensor | None = before["eager"](q_length=q_length, dtype=dtype, **kwargs)
            return found
        return rule(q_length=q_length, **kwargs | {"allow_is_causal_skip": False, "added": dtype})

    interface["sdpa"], interface["eager"] = rule, added_rule
    try:
        yield
    finally:
        for kind, function in before.items():
            if function is shared[kind]:
                del interface[kind]
            else:
                interface[kind] = function


@contextmanager
def eager_attention_by(attend: Callable[..., Any]) -> Iterator[None]:
    """Within this context a module that asks for "eager" attention gets `attend`, with its own
    function as the first argument."""
    models = sys.modules.get("transformers.modeling_utils")
    if models is None:
        yield
        return
    interface = models.ALL_ATTENTION_FUNCTIONS
    before, own = vars(interface).get("get_interface"), interface.get_interface

    def get_interface(attn_implementation: str, default: Callable) -> Callable:
        if attn_implementation == "eager":
            return partial(attend, default)
        found: Callable = own(attn_implementation, default)
        return found

    interface.get_interface = get_interface
    try:
        yield
    finally:
        if before is None:
            del interface.get_interface
        else:
            interface.get_interface = before
