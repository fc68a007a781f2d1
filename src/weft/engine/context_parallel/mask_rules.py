"""What a model hands on in place of a mask of transformers, where ranks share sequences: the rule
by which it would be made, and no numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from weft.core import UnsupportedModel
from weft.nn import AttentionPattern

from ..microbatch import SequenceInfo
from .followed_calls import wholes
from .known_sequences import KnownSequences
from .whole_marks import is_marked, tensors_of, whole_of


def rule_of(
    now: SequenceInfo,
    known: KnownSequences | None,
    refusal: UnsupportedModel,
    samples: int,
    here: int,
    *,
    mask_function: Callable,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    local_size: int | None = None,
    added: torch.dtype = torch.bool,
    **rest: Any,
) -> Tensor | None:
    """What transformers' mask is here; None where it would have none, with all positions at hand.

    Args:
        now: the sequences of the microbatch that runs.
        known: of these, where values are followed.
        refusal: of a rule that reads what a rank has a part of.
        samples: of the microbatch.
        here: positions on this rank.
        mask_function: (sample, head, query, key) -> whether it is seen.
        allow_is_causal_skip: whether None stands for the causal mask.
        allow_is_bidirectional_skip: whether None stands for no mask.
        local_size: how many positions are seen at most.
        added: the dtype of a mask that is added to scores.
        **rest: what else transformers says.
    """
    plain = (
        now.valid is None
        and now.documents is None
        and (local_size is None or now.length < local_size)
    )
    if plain and (allow_is_causal_skip or allow_is_bidirectional_skip):
        return None

    def seen(q: Tensor, k: Tensor) -> Tensor:
        sample = torch.arange(samples, device=q.device).view(-1, 1, 1, 1)
        # what the model has made of its batch
        whole = nullcontext() if known is None else OnWholes(known.use)
        try:
            with whole:
                found: Tensor = mask_function(sample, sample.new_zeros(()), q, k)
        except IndexError as error:
            raise refusal from error
        return found

    pattern = AttentionPattern(False, seen, now.documents, now.valid)
    return mask_placeholder(pattern, samples, here, added)


def mask_placeholder(
    pattern: AttentionPattern, samples: int, length: int, dtype: torch.dtype = torch.bool
) -> Tensor:
    """What a model hands on in place of a mask: no memory, and the rule with it."""
    mask = torch.empty(samples, 1, length, length, dtype=dtype, device="meta")
    mask.weft_pattern = pattern  # type: ignore[attr-defined]
    return mask


def whole_mask(placeholder: Tensor, queries: Tensor, length: int) -> Tensor:
    """The mask [b, 1, q, length] that is stood for, of queries at these positions: bool, or added
    to the scores."""
    pattern: AttentionPattern = placeholder.weft_pattern  # type: ignore[attr-defined]
    seen, dtype = pattern.rows(queries, length), placeholder.dtype
    if dtype != torch.bool:
        added = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        seen = added.masked_fill_(~seen, torch.finfo(dtype).min)
    return seen.expand(placeholder.shape[0], *seen.shape[1:])


def added_to_scores(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of this rank's queries with all keys, as what is added to scores [b or 1, heads or 1,
    queries here or 1, all keys]."""
    if rows.dtype == torch.bool:
        zeros = torch.zeros(rows.shape, dtype=dtype, device=rows.device)
        rows = zeros.masked_fill_(~rows, -torch.inf)
    return rows[(None,) * (4 - rows.ndim)]


class OnWholes(TorchFunctionMode):
    """Within this context functions take what is known for all positions in place of its part.
    `used`: told that there is such."""

    def __init__(self, used: Callable[[], None]):
        super().__init__()
        self._used = used

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(is_marked(x) and whole_of(x) is not None for x in tensors_of((args, kwargs))):
            self._used()
        return func(*wholes(args), **wholes(kwargs or {}))
