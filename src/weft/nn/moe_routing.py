"""Routing over all tokens, on whichever rank they are, and the losses that a gate adds to
training.

A model calls these as on one device. Where ranks have parts of the tokens, shares and counts are of
all of them, and an expert's capacity is that of a whole sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function

from weft._torch.autograd import in_backward
from weft._torch.modes import function_modes

NOWHERE = -1  # in place of an expert: a choice that none takes


def count_choices(index: Tensor, experts: int) -> Tensor:
    """How many choices each expert has: int [...] -> int64 [1 + experts], the first `NOWHERE`'s."""
    flat = index.reshape(-1).long().clamp(min=NOWHERE) + 1
    return flat.new_zeros(1 + experts).scatter_add_(
        0, flat, torch.ones_like(flat)
    )  # bincount would wait for a GPU


def routing_arguments(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """Tokens, experts and weights of a call of a module that holds experts, whose forward names
    them so."""
    return [args[place] if place < len(args) else kwargs[name] for place, name in enumerate(names)]


def expert_shares(index: Tensor, experts: int) -> Tensor:
    """Which share of all choices each expert has: int [n, k] of the tokens that are here -> float32
    [experts], which has no gradient."""
    if function_modes():
        found: Tensor = handle_torch_function(expert_shares, (index,), index, experts)
        return found
    counts = count_choices(index, experts)[1:]
    return counts / counts.sum()


def with_loss(x: Tensor, loss: Tensor) -> Tensor:
    """`x`, in whose backward `loss` is added to what is minimised. Like the loss of `weft.losses`
    it is a sum over the tokens that are here, and the total is divided by all that count
    (Megatron-LM has its balance loss so)."""
    if function_modes():
        found: Tensor = handle_torch_function(with_loss, (x, loss), x, loss)
        return found
    added: Tensor = AddLoss.apply(x, loss, 1.0)
    return added


class AddLoss(torch.autograd.Function):
    """`with_loss`, the loss multiplied by what backward starts from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], torch.full_like(ctx.like, ctx.scale), None


def balance_loss(probabilities: Tensor, index: Tensor) -> Tensor:
    """E times the sum over E experts of share of choices x probability, summed over the tokens that
    are here: 1 for each where all experts have the same (Fedus et al. 2022). [n, E], int [n, k]."""
    share = expert_shares(index, probabilities.shape[-1]).to(probabilities.dtype)
    return probabilities.shape[-1] * (probabilities.sum(0) * share).sum()


def z_loss(logits: Tensor) -> Tensor:
    """The squares of the log-sum-exp, summed over tokens (Zoph et al. 2022). [n, E]."""
    return torch.logsumexp(logits, -1).square().sum()


def within_capacity(index: Tensor, experts: int, factor: float) -> Tensor:
    """int [b, s, k] -> the same, `NOWHERE` in place of each choice for which its expert has no
    room.

    An expert takes of every sequence at most ceil(factor k s / E) choices, those of earlier
    positions first, and of one position the earlier choice (the groups of GShard, Lepikhin et al.
    2021, one for each sequence; the order of Switch, Fedus et al. 2022). So neither the batch, the
    microbatch nor the layout decides what is dropped, and no token's fate hangs on later ones."""
    if function_modes():
        found: Tensor = handle_torch_function(within_capacity, (index,), index, experts, factor)
        return found
    b, s, k = index.shape
    flat = index.reshape(b, s * k).long()
    order = flat.argsort(dim=1, stable=True)  # every expert's choices in a row
    counts = flat.new_zeros(b, experts).scatter_add_(1, flat, torch.ones_like(flat))
    starts = (counts.cumsum(1) - counts).gather(1, flat.gather(1, order))
    place = torch.empty_like(flat).scatter_(
        1, order, torch.arange(s * k, device=index.device) - starts
    )
    return index.masked_fill(place.view_as(index) >= math.ceil(factor * k * s / experts), NOWHERE)


class GateBias(nn.Module):
    """Added to each expert's score where experts are chosen, and nowhere else: after every
    optimizer step it rises by `rate` for experts that had fewer tokens than the mean, and falls for
    others (Wang et al. 2024). `rebalance` moves it."""

    state: Tensor

    def __init__(self, experts: int, rate: float):
        super().__init__()
        self.rate = rate
        # [2, E]: the bias, and the choices of this step. One buffer: who counts also keeps the bias
        self.register_buffer("state", torch.zeros(2, experts))

    @property
    def bias(self) -> Tensor:
        """[E]."""
        return self.state[0]

    @torch.compiler.disable  # a compiled forward does not know whether a backward runs it
    def count(self, index: Tensor) -> None:
        """These choices are of this step: int [n, k]."""
        # a forward that is run again for its backward counts nothing
        if self.training and torch.is_grad_enabled() and not in_backward():
            self.state[1] += count_choices(index, self.state.shape[1])[1:].to(self.state.dtype)

    def move(self, load: Tensor) -> None:
        """A step has ended, in which all tokens together made so many choices of each expert:
        [E]."""
        self.state[0] += self.rate * torch.sign(load.mean() - load)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self.state
        super()._apply(fn, recurse)
        if (
            self.state.is_floating_point() and self.state.itemsize < before.itemsize
        ):  # it counts, and takes small steps
            self.state = before.to(self.state.device)
        return self


@torch.no_grad()
def rebalance_gates(
    model: nn.Module,
    total: Callable[[Tensor], Tensor] = lambda load: load,
    absent: Collection[str] = (),
    taken: bool = True,
) -> None:
    """Move the biases of all gates of a model after an optimizer step. weft.Engine does it by
    itself.

    Args:
        model: the model whose gates have a `GateBias`.
        total: sums the load of all gates' experts on this rank, int64 [gates * experts], over all
            ranks.
        absent: names of buffers that other ranks keep.
        taken: whether the optimizer step was taken; otherwise the choices are forgotten.
    """
    named = model.named_modules()
    found = [
        m
        for name, m in named
        if isinstance(m, GateBias) and f"{name}.state".lstrip(".") not in absent
    ]
    if found and taken:
        loads = total(torch.cat([bias.state[1] for bias in found]))
        for bias, load in zip(
            found, loads.split([bias.state.shape[1] for bias in found]), strict=True
        ):
            bias.move(load)
    for bias in found:
        bias.state[1] = 0.0
