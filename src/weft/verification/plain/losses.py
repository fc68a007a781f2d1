"""weft's losses in plain torch: its cross-entropy of whole logits, and squares of differences."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.nn import causal_lm, classification, mse, next_token

# (output, batch) -> (sum, weight, how many labels were asked for)
PlainLoss = Callable[[Any, Mapping[str, Tensor]], tuple[Tensor, Tensor, int]]
NONE = -100  # in place of a label that does not count


def plain_loss(loss: Callable[..., Any]) -> PlainLoss | None:
    """The definition of one of `weft.losses`; None for a loss of the user's own."""
    while isinstance(loss, functools.partial) and not (loss.args or loss.keywords):
        loss = loss.func
    return _PLAIN.get(loss)


def _entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, int]:
    rows, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    if rows.dtype in (torch.bfloat16, torch.float16):
        rows = rows.float()
    total = F.cross_entropy(rows, targets, ignore_index=NONE, reduction="sum")
    return total, (targets != NONE).sum().to(rows.dtype), labels.numel()


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
