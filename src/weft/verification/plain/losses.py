"""Losses in plain torch: weft's cross-entropy of whole logits, and squares of differences; those of
users as they are, but that `weft.losses.cross_entropy` in them has this definition too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft._torch.trees import tree_map
from weft.nn import causal_lm, classification, cross_entropy_by, mse, next_token, weighed_loss

# (output, batch) -> (sum, weight, how many labels were asked for)
PlainLoss = Callable[[Any, Mapping[str, Tensor]], tuple[Tensor, Tensor, int]]
NONE = -100  # in place of a label that does not count
_LOW = (torch.bfloat16, torch.float16)


def plain_loss(loss: Callable[..., Any]) -> PlainLoss | None:
    """The definition of one of `weft.losses`; None for a loss of the user's own."""
    while isinstance(loss, functools.partial) and not (loss.args or loss.keywords):
        loss = loss.func
    return _PLAIN.get(loss)


def own_loss(
    loss: Callable[..., Any], output: Any, batch: Mapping[str, Tensor]
) -> tuple[Tensor, Any, list[int]]:
    """(sum, weight, labels of each cross-entropy) of a loss of the user's own. It gets outputs in
    float32 where the model computes below that, unless it is marked as one that widens them.
    Raises ConfigError: it returns something else."""
    asked = list[int]()

    def entropy(logits: Tensor, labels: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
        total, weight, count = _entropy(logits, labels, ignored)
        asked.append(count)
        return total, weight

    def wide(leaf: Any) -> Any:
        return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in _LOW else leaf

    marked = loss
    while isinstance(marked, functools.partial):
        marked = marked.func
    given = output if getattr(marked, "vocab_parallel", False) else tree_map(wide, output)
    with cross_entropy_by(entropy):
        found = loss(given, batch)
    match found:
        case (Tensor() as total, weight) if total.numel() == 1 and _is_number(weight):
            weight = weight.reshape(()) if isinstance(weight, Tensor) else weight
            return total.reshape(()), weight, asked
    weighed_loss(loss, output, batch)  # says what is wrong with it
    raise TypeError(f"{loss} returns {found}")


def _is_number(weight: Any) -> bool:
    return weight.numel() == 1 if isinstance(weight, Tensor) else isinstance(weight, Real)


def _entropy(logits: Tensor, labels: Tensor, ignored: int = NONE) -> tuple[Tensor, Tensor, int]:
    rows, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    if rows.dtype in _LOW:
        rows = rows.float()
    total = F.cross_entropy(rows, targets, ignore_index=ignored, reduction="sum")
    return total, (targets != ignored).sum().to(rows.dtype), labels.numel()


def _logits(output: Any) -> Tensor:
    found: Tensor = output if isinstance(output, Tensor) else output.logits
    return found


def _aligned(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, int]:
    """The logits of each position beside the token of the next; the last one has none."""
    total, weight, _ = _entropy(logits[:, :-1], tokens[:, 1:])
    return total, weight, tokens.numel()


def _next_token(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, int]:
    if "labels" in batch:
        return _entropy(_logits(output), batch["labels"])
    return _aligned(_logits(output), batch["input_ids"])


def _causal_lm(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, int]:
    tokens = batch["labels"] if "labels" in batch else batch["input_ids"]
    return _aligned(_logits(output), tokens)


def _classification(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, int]:
    return _entropy(_logits(output), batch["label"] if "label" in batch else batch["labels"])


def _squares(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, int]:
    found, target = _logits(output), batch["target"]
    if found.shape != target.shape:
        raise ValueError(f"output of shape {list(found.shape)}, target {list(target.shape)}")
    wide = torch.promote_types(found.dtype, torch.float32)
    error = found.to(wide) - target.to(wide)
    return (error * error).sum(), torch.tensor(float(error.numel()), dtype=error.dtype), 0


_PLAIN: Mapping[Any, PlainLoss] = {
    next_token: _next_token,
    causal_lm: _causal_lm,
    classification: _classification,
    mse: _squares,
}
