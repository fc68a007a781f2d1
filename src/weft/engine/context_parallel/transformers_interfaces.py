"""The interfaces by which models of transformers ask for a mask and for attention, in the hands of
weft: the rule of a mask instead of its matrix, and eager attention over parts of the sequence.

Both are transformers' own, local overrides, taken back at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from .sequence import ContextParallel


@contextmanager
def mask_rules(sequence: ContextParallel) -> Iterator[None]:
    """Within this context transformers asks `sequence` for each mask of attention."""

    def rule(batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> Tensor | None:
        return sequence.rule(batch_size, q_length, **kwargs)

    def added_rule(*args: Any, dtype: torch.dtype, **kwargs: Any) -> Tensor | None:
        kwargs |= {"allow_is_causal_skip": False, "added": dtype}  # the mask says all
        return rule(*args, **kwargs)

    interface = "masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS"
    with ExitStack() as stack:
        stack.enter_context(_overridden(*interface, "sdpa", rule))
        stack.enter_context(_overridden(*interface, "eager", added_rule))
        yield


@contextmanager
def eager_attention_by(attend: Callable[..., Any]) -> Iterator[None]:
    """Within this context transformers calls `attend` for attention that is a module's own."""
    with _overridden("modeling_utils", "ALL_ATTENTION_FUNCTIONS", "eager", attend):
        yield


@contextmanager
def _overridden(module: str, interface: str, name: str, function: Callable) -> Iterator[None]:
    loaded = sys.modules.get(f"transformers.{module}")
    if loaded is None:  # no model of transformers can be running
        yield
        return
    functions = getattr(loaded, interface)
    shared = type(functions)()  # a new one has no overrides
    before = functions.get(name)
    functions[name] = function
    try:
        yield
    finally:
        if before is shared.get(name):
            del functions[name]
        else:
            functions[name] = before
