"""weft's mixtures of experts by their definitions: each expert computes its tokens one after the
other, and choices are counted one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.nn import Experts, Gate, GateBias, Mixture, expert_shares, with_loss, within_capacity

NOBODY = -1  # in place of an expert: a choice that none takes


def shares_of_choices(index: Tensor, experts: int) -> Tensor:
    """The share of all choices that each expert has, [experts]."""
    numbers = torch.arange(experts, device=index.device)
    chosen = (index.reshape(-1, 1) == numbers).sum(0)
    return chosen / chosen.sum()


def choices_with_room(index: Tensor, experts: int, factor: float) -> Tensor:
    """Of every sequence an expert takes the first ceil(factor * k * s / experts) choices, by
    position and then by choice: int [b, s, k], `NOBODY` in place of the others."""
    _, s, k = index.shape
    room = math.ceil(factor * k * s / experts)
    kept = index.clone()
    for sequence in kept:
        taken = [0] * experts
        for position in sequence:
            for choice, expert in enumerate(position.tolist()):
                taken[expert] += 1
                if taken[expert] > room:
                    position[choice] = NOBODY
    return kept


def numbers_of_experts(tokens: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """What a run tells of its experts. `tokens`: as of PlainExperts."""
    if not tokens:
        return {}
    found = tokens_by_expert({module: row[1:] for module, row in tokens.items()})
    busiest = [max(row[1:]) / (sum(row[1:]) / (len(row) - 1)) for row in tokens.values()]
    every = sum(sum(row[1:]) for row in tokens.values())
    dropped = sum(row[0] for row in tokens.values()) / every
    return {**found, "busiest_expert": max(busiest), "dropped_share": dropped}


def tokens_by_expert(tokens: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """The choices that each expert of a module had, as one number each."""
    return {
        f"tokens of expert {expert} of {module}": float(count)
        for module, row in tokens.items()
        for expert, count in enumerate(row)
    }


class PlainExperts:
    """Moves the biases of a model's gates; with `compute` its mixtures have these definitions.

    `tokens`: by the module that holds experts, how many choices of this step none took, and then
    all that each expert had."""

    def __init__(self, model: nn.Module, compute: bool):
        self._biases = [m for m in model.modules() if isinstance(m, GateBias)]
        self._loads = {bias: torch.zeros(bias.state.shape[1]) for bias in self._biases}
        self.tokens: dict[str, list[int]] = {}
        for name, module in model.named_modules():
            for kind, forward in _FORWARDS if compute else ():
                if getattr(module.forward, "__func__", None) is kind.forward:  # not a user's own
                    if isinstance(module, Mixture):
                        self._watch(f"{name}.experts".lstrip("."), module)
                    module.forward = MethodType(forward, module)  # type: ignore[method-assign]
        for bias in self._biases:
            bias.count = self._counter(bias)  # type: ignore[method-assign]

    def _counter(self, bias: GateBias) -> Callable[[Tensor], None]:
        def count(index: Tensor) -> None:
            if bias.training and torch.is_grad_enabled():
                for expert in index.flatten().tolist():
                    self._loads[bias][expert] += 1

        return count

    def _watch(self, name: str, module: Mixture) -> None:
        self.tokens[name] = [0] * (1 + module.experts.num_experts)
        module.gate.register_forward_hook(partial(self._choose, name))
        module.experts.register_forward_pre_hook(partial(self._take, name))

    def _choose(self, name: str, gate: nn.Module, args: tuple, made: tuple) -> None:
        if gate.training and torch.is_grad_enabled():
            for expert in made[1].flatten().tolist():
                self.tokens[name][1 + expert] += 1

    def _take(self, name: str, experts: nn.Module, args: tuple) -> None:
        if experts.training and torch.is_grad_enabled():
            self.tokens[name][0] += args[1].flatten().tolist().count(NOBODY)

    def step_begins(self) -> None:
        """Nothing is counted yet."""
        for row in self.tokens.values():
            row[:] = [0] * len(row)

    @torch.no_grad()
    def move(self, taken: bool = True) -> None:
        """A step has ended: experts with fewer tokens than the mean are preferred a little more
        (Wang et al. 2024), if it was `taken`."""
        for bias in self._biases:
            load = self._loads[bias]
            mean = float(load.mean())
            for expert, tokens in enumerate(load.tolist() if taken else ()):
                bias.state[0, expert] += bias.rate * ((tokens < mean) - (tokens > mean))
            load.zero_()


def _gate(self: Gate, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = x @ self.weight.T
    if self.kind == "sigmoid":
        scores = 1.0 / (1.0 + (-logits).exp())
    else:
        scores = (logits - logits.logsumexp(-1, keepdim=True)).exp()
    preferred = scores.detach() if self.bias is None else scores.detach() + self.bias.state[0]
    index = preferred.argsort(dim=-1, descending=True)[:, : self.active]
    if self.bias is not None:
        self.bias.count(index)
    weights = scores.gather(-1, index)
    if self.active > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return logits, index, weights


def _experts(self: Experts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for expert in range(self.num_experts):
        gate, up = (x @ self.up[expert].T).chunk(2, -1)
        made = (gate * torch.sigmoid(gate) * up) @ self.down[expert].T
        y = y + made * torch.where(index == expert, weights, 0.0).sum(-1, keepdim=True)
    return y


def _mixture(self: Mixture, x: Tensor) -> Tensor:
    tokens = x.reshape(-1, x.shape[-1])
    logits, index, weights = self.gate(tokens)
    experts = logits.shape[-1]
    if self.training and torch.is_grad_enabled() and (self.balance or self.z):
        if self.gate.kind == "sigmoid":
            scores = 1.0 / (1.0 + (-logits).exp())
            scores = scores / scores.sum(-1, keepdim=True)
        else:
            scores = F.softmax(logits, -1)
        share = expert_shares(index, experts)
        # Fedus et al. 2022, equation 4, for each token; Zoph et al. 2022, equation 5
        balance = experts * (share * scores).sum()
        size = (logits.exp().sum(-1).log() ** 2).sum()
        tokens = with_loss(tokens, self.balance * balance + self.z * size)
    if self.training and self.capacity:
        by_sequence = index.reshape(x.shape[0], x.shape[1], -1)
        index = within_capacity(by_sequence, experts, self.capacity).reshape(index.shape)
    y = self.experts(tokens, index, weights).reshape(x.shape)
    return y if self.shared is None else y + self.shared(x)


_FORWARDS: tuple[tuple[type[nn.Module], Callable[..., Any]], ...] = (
    (Gate, _gate),
    (Experts, _experts),
    (Mixture, _mixture),
)
