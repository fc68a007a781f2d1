"""Does a model read the tokens that its loss has it predict?

Both sides of a comparison call the same model, so that a causal mask which is lost in it shows in
neither.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from weft._torch.trees import tree_flatten
from weft.nn import causal_lm, next_token

LEAST = 4  # positions of which some are changed
ROUNDING = 1e-9  # of float64, relative
IDS = "input_ids"


@torch.no_grad()
def reads_later_tokens(
    forward: Callable[[dict[str, Tensor]], Any],
    loss: Callable[..., Any],
    batch: Mapping[str, Tensor],
) -> bool | None:
    """Whether an output at a position changes with the tokens after it.

    Args:
        forward: (batch) -> what the model returns, in float64 and evaluation mode.
        loss: of the run.
        batch: [samples, positions] of `input_ids` with what goes with them; one sample is taken.

    Returns:
        None where the loss is none that predicts the next token, or where outputs are not told by
        position.
    """
    while isinstance(loss, functools.partial):
        loss = loss.func
    ids = batch.get(IDS)
    if loss not in (next_token, causal_lm) or ids is None or ids.ndim != 2:
        return None
    length, one = ids.shape[1], {key: value[:1] for key, value in batch.items()}
    kept = length // 2
    changed = one[IDS].clone()
    changed[:, kept:] = one[IDS][:, : length - kept].flip(1)
    if length < LEAST or bool((changed == one[IDS]).all()):
        return None
    before, _ = tree_flatten(forward(one))
    after, _ = tree_flatten(forward({**one, IDS: changed}))
    pairs = [(x, y) for x, y in zip(before, after, strict=True) if _has_positions(x, length)]
    if not pairs:
        return None
    return any(_differ(x[:, :kept], y[:, :kept]) for x, y in pairs)


def _has_positions(x: Any, length: int) -> bool:
    return (
        isinstance(x, Tensor)
        and x.is_floating_point()
        and x.ndim == 3
        and x.shape[:2] == (1, length)
    )


def _differ(x: Tensor, y: Tensor) -> bool:
    return float((x - y).abs().max()) > ROUNDING * float(x.abs().max())
