"""Labels of language models: shifted by one, as weft's data has them, or aligned with the input, as
transformers takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from weft.core import DataError

Batch = Mapping[str, Tensor]

IGNORED = -100  # the label that does not count, as in torch and transformers


def shift_labels(labels: Tensor) -> Tensor:
    """The label of the next position at each position; -100 at the last.

    Args:
        labels: [b, s], of the tokens at their own positions.

    Example:
        >>> shift_labels(torch.tensor([[5, 6, 7]]))
        tensor([[   6,    7, -100]])
    """
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def check_labels(loss: Callable[..., Any], batch: Batch) -> None:
    """Refuse labels that are shifted where the loss shifts them itself, or are not shifted where
    nothing shifts them: training would learn to copy its input, or to skip a token.

    Args:
        loss: a loss, which says by its attribute `labels` what it takes: "shifted" or "aligned".
        batch: whole sequences: "labels" [b, s], beside "decoder_input_ids" or "input_ids" [b, s].

    Raises:
        DataError: the labels are the other kind, wherever one counts.
    """
    takes = getattr(loss, "labels", None)
    ids, labels = batch.get("decoder_input_ids", batch.get("input_ids")), batch.get("labels")
    if takes is None or ids is None or labels is None or ids.shape != labels.shape:
        return
    if ids.ndim != 2 or labels.is_floating_point():
        return
    aligned, shifted = _fits(labels, ids), _fits(labels, shift_labels(ids))
    if aligned == shifted:  # neither, or tokens that are all alike
        return
    name = f"weft.losses:{getattr(loss, '__name__', loss)}"
    if takes == "shifted" and aligned:
        problem = "labels equal the input: next_token takes labels that are shifted by one"
        fix = 'use "weft.losses:causal_lm", which shifts them'
        raise DataError("train.loss", name, problem, fix)
    if takes == "aligned" and shifted:
        problem = "labels are shifted already: causal_lm would shift them once more"
        raise DataError("train.loss", name, problem, 'use "weft.losses:next_token"')


def _fits(labels: Tensor, tokens: Tensor) -> bool:
    """Whether every label that counts is the token at its position."""
    counted = (labels != IGNORED) & (tokens != IGNORED)
    return bool(counted.any()) and bool((labels == tokens)[counted].all())
