"""Attention that is a model's own, of this rank's queries with the keys of all ranks.

Its scores are whatever the model makes of them (capped, with sinks, biased), so that blocks of keys
cannot be merged: keys and values are gathered first, and the model's function runs as it is.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from weft.nn import EagerAttention

from .known_sequences import KnownSequences
from .mask_rules import whole_mask
from .sequence import ContextParallel, check_path


def attend_eagerly(
    sequence: ContextParallel,
    attend: EagerAttention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """What `attend` gives for this rank's positions.

    Args:
        sequence: which positions ranks have.
        attend: the model's function.
        module: whose attention it is.
        query: [b, heads, positions here, d].
        key: [b, kv heads, positions here, d], as `value`.
        mask: what stands for one, or None.
        options: what else the function is given.

    Raises:
        UnsupportedModel: The mask says nothing of other ranks' keys.
    """
    length = sequence.now.length
    sequence.pattern(query, key, mask, False)  # refuses what says nothing of other keys
    check_path(sequence)
    sequence.calls += 1
    key, value = sequence.gathered(key, 2), sequence.gathered(value, 2)
    if mask is not None and mask.is_meta:
        mask = whole_mask(mask, sequence.positions(length, query.device), length)
    elif sequence.known is not None:
        mask = _of_all_keys(sequence.known, mask)
    if sequence.known is not None:
        options = {name: _of_all_keys(sequence.known, x) for name, x in options.items()}
    return attend(module, query, key, value, mask, **options)


def _of_all_keys(known: KnownSequences, x: Any) -> Any:
    """Of what is known for pairs of positions, the rows of this rank's queries."""
    rows = known.rows(x) if isinstance(x, Tensor) and x.ndim > 2 else None
    return x if rows is None else rows
