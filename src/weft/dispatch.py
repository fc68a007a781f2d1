"""Tokens that travel to their experts, and back.

A module that holds experts is called with tokens [n, dim], which experts each goes to [n, k], and with which weights
[n, k]. Where its experts are spread over ranks, every rank sends each token to the ranks of its experts, each rank runs
the module's own forward with what has come to those it has, and sends that back, where it is weighted and summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class _Exchange(torch.autograd.Function):
    """Rows [n, dim] to ranks, `sent[r]` of them to rank r, of which `received[r]` come; backward goes the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.rest = sent, received, group
        return _exchanged(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.rest
        return _exchanged(grads[0], received, sent, group), None, None, None


def _exchanged(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


def dispatched(
    forward: Callable[..., Tensor], params: Sequence[Tensor], experts: int, group: dist.ProcessGroup, tokens: Tensor,
    index: Tensor, weights: Tensor, *rest: Any, **named: Any,
) -> Tensor:  # fmt: skip
    """`forward` of a module that has its part of the experts in `params`: [n, dim], int [n, k], [n, k] -> [n, dim]."""
    size = dist.get_world_size(group)
    each, k = experts // size, index.shape[-1]
    wanted = index.reshape(-1)
    order = torch.argsort(wanted, stable=True)  # by expert, so by rank
    counts = torch.bincount(wanted, minlength=experts).view(size, each)
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts, group=group)
    sent, received = counts.sum(1).tolist(), coming.sum(1).tolist()
    rows = order // k
    here: Tensor = _Exchange.apply(tokens[rows], sent, received, group)
    # from every rank they come in the order of experts
    mine = torch.arange(each, device=index.device).repeat(size).repeat_interleave(coming.flatten())
    ones = torch.ones(len(mine), 1, dtype=weights.dtype, device=weights.device)
    made = forward(here, mine.unsqueeze(1).to(index.dtype), ones, *rest, **named)
    if not len(here):  # as on one device, experts that no token chose have a gradient, of zeros
        made = made + sum(p.reshape(-1)[:1].sum() * 0.0 for p in params)
    back: Tensor = _Exchange.apply(made, received, sent, group)
    factors = weights.reshape(-1)[order].unsqueeze(-1)
    return torch.zeros_like(tokens).index_add(0, rows, (back * factors).to(tokens.dtype))


def spread(module: nn.Module, experts: int, group: dist.ProcessGroup | None) -> None:
    """Let a module that holds its part of `experts` experts be called as if it held all."""
    if group is None:
        return
    forward = module.forward

    def call(tokens: Tensor, index: Tensor, weights: Tensor, *rest: Any, **named: Any) -> Tensor:
        return dispatched(forward, [*module.parameters()], experts, group, tokens, index, weights, *rest, **named)

    module.forward = call  # type: ignore[method-assign]
