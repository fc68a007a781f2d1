"""What a gate of experts asks of all tokens of a microbatch, wherever they are, and losses that it adds for itself.

A model calls these as on one device. Where ranks have parts of the tokens, shares are of all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack, handle_torch_function


def shares(index: Tensor, experts: int) -> Tensor:
    """Which share of all choices each expert has: int [n, k] of the tokens that are here -> float32 [experts], which
    has no gradient."""
    if _get_current_function_mode_stack():
        found: Tensor = handle_torch_function(shares, (index,), index, experts)
        return found
    counts = torch.bincount(index.reshape(-1), minlength=experts)
    return counts / counts.sum()


def with_loss(x: Tensor, loss: Tensor) -> Tensor:
    """`x`, in whose backward `loss` is added to what is minimised. Like the loss of `weft.losses` it is a sum over the
    tokens that are here, and the total is divided by all that count (Megatron-LM has its balance loss so)."""
    if _get_current_function_mode_stack():
        found: Tensor = handle_torch_function(with_loss, (x, loss), x, loss)
        return found
    added: Tensor = WithLoss.apply(x, loss, 1.0)
    return added


class WithLoss(torch.autograd.Function):
    """`with_loss`, the loss multiplied by what backward starts from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], torch.full_like(ctx.like, ctx.scale), None


def balance_loss(probabilities: Tensor, index: Tensor) -> Tensor:
    """E times the sum over E experts of share of choices x probability, summed over the tokens that are here: 1 for
    each where all experts have the same (Fedus et al. 2022). [n, E], int [n, k]."""
    share = shares(index, probabilities.shape[-1]).to(probabilities.dtype)
    return probabilities.shape[-1] * (probabilities.sum(0) * share).sum()


def z_loss(logits: Tensor) -> Tensor:
    """The squares of the log-sum-exp, summed over tokens (Zoph et al. 2022). [n, E]."""
    return torch.logsumexp(logits, -1).square().sum()
