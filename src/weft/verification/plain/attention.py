"""Scaled dot-product attention by its definition (Vaswani et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    drop: Callable[[Tensor], Tensor],
) -> Tensor:
    """softmax(query @ key.T * scale + mask) @ value, with dropout of the weights.

    Args:
        query: [..., heads, s, d].
        key: [..., heads or fewer, t, d].
        value: [..., heads or fewer, t, e].
        mask: [..., s, t], bool (true: is seen) or added; None: none.
        is_causal: whether query i sees the keys up to i alone.
        scale: of the products; None: 1 / sqrt(d).
        drop: dropout of the weights [..., heads, s, t].
    """
    groups = query.shape[-3] // key.shape[-3] if query.ndim > 2 else 1
    if groups > 1:  # query head h has the keys of head h // groups
        heads = torch.arange(query.shape[-3], device=query.device) // groups
        key, value = key.index_select(-3, heads), value.index_select(-3, heads)
    wide = torch.promote_types(query.dtype, torch.float32)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.einsum("...sd,...td->...st", query.to(wide), key.to(wide)) * factor
    hidden = torch.zeros(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    if is_causal:
        s, t = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
        hidden = t[None, :] > s[:, None]
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    elif mask is not None:
        scores = scores + mask.to(wide)
    scores = scores.masked_fill(hidden, -math.inf)
    highest = scores.detach().amax(-1, keepdim=True)
    exponentials = (scores - highest.masked_fill(highest == -math.inf, 0.0)).exp()
    total = exponentials.sum(-1, keepdim=True)
    weights = exponentials / total.masked_fill(total == 0.0, 1.0)  # who sees nothing gets nothing
    return drop(weights).to(value.dtype) @ value


def mask_of_documents(position_ids: Tensor, window: int | None = None) -> Tensor | None:
    """Bool [b, 1, s, s]: a position sees those before it, and itself, in its own document, of the
    last `window`. Positions [b, s] of a document go up by 1. None: the causal mask alone."""
    b, s = position_ids.shape
    starts = torch.ones(b, s, dtype=torch.bool, device=position_ids.device)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if window is None and not bool(starts[:, 1:].any()):
        return None
    places = torch.arange(s, device=position_ids.device)
    start = torch.where(starts, places, 0).cummax(1).values  # where each position's document begins
    seen = (places[None, None, :] <= places[None, :, None]) & (
        places[None, None, :] >= start[:, :, None]
    )
    if window is not None:
        seen = seen & (places[None, :] > places[:, None] - window)
    return seen[:, None]
