"""Local SGD, BMUF and DiLoCo by their papers' equations, for all replicas on one device.

Replicas train by themselves. A part of the model is exchanged every `period` steps; if there are
several parts they take turns. The difference between the weights that a part began with (its
anchor) and the mean of the replicas' weights makes a new anchor, with which all replicas go on. If
an exchange takes `delay` steps, a replica adds what it did meanwhile (Douillard et al. 2025).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
# (part, its anchor, what each replica sent of it) -> the mean of anchor - sent
MeanDifference = Callable[[int, Weights, Sequence[Weights]], Weights]


class OuterRule(ABC):
    """How a new anchor is made. `options`: the synchroniser's."""

    def __init__(self, options: Mapping[str, Any], anchor: Weights):
        self.options = options
        self.anchor = {name: value.clone() for name, value in anchor.items()}

    @abstractmethod
    def move(self, name: str, difference: Tensor) -> None:
        """A new anchor of a weight, from anchor - mean."""

    def momentum(self, name: str) -> Tensor | None:
        """What is kept of the differences so far, in their unit; None: nothing."""
        return None


class Averaging(OuterRule):
    """Local SGD (Stich 2019): the mean of the weights."""

    def move(self, name: str, difference: Tensor) -> None:
        self.anchor[name] -= difference


class BlockFilter(OuterRule):
    """BMUF (Chen & Huo 2016): G = mean - anchor; D = momentum D + rate G; W = W + D. The next block
    begins with W, or with Nesterov block momentum W + momentum D."""

    def __init__(self, options: Mapping[str, Any], anchor: Weights):
        super().__init__(options, anchor)
        self.weights = {name: value.clone() for name, value in self.anchor.items()}
        self.filtered = {name: torch.zeros_like(value) for name, value in self.anchor.items()}

    def move(self, name: str, difference: Tensor) -> None:
        eta, zeta = self.options["momentum"], self.options["lr"]
        self.filtered[name] = eta * self.filtered[name] + zeta * -difference
        self.weights[name] = self.weights[name] + self.filtered[name]
        ahead = eta * self.filtered[name] if self.options["nesterov"] else 0.0
        self.anchor[name] = self.weights[name] + ahead

    def momentum(self, name: str) -> Tensor | None:
        return -self.filtered[name] / self.options["lr"] if self.options["momentum"] else None


class OuterSGD(OuterRule):
    """DiLoCo (Douillard et al. 2024): torch's SGD with Nesterov momentum, whose gradient is the
    difference."""

    def __init__(self, options: Mapping[str, Any], anchor: Weights):
        super().__init__(options, anchor)
        momentum, lr = self.options["momentum"], self.options["lr"]
        for value in self.anchor.values():
            value.requires_grad_(True)
        self.optimizers = {
            name: torch.optim.SGD([value], lr=lr, momentum=momentum, nesterov=momentum > 0)
            for name, value in self.anchor.items()
        }

    def move(self, name: str, difference: Tensor) -> None:
        self.anchor[name].grad = difference
        self.optimizers[name].step()

    def momentum(self, name: str) -> Tensor | None:
        if not self.options["momentum"]:
            return None
        value = self.anchor[name]
        kept = self.optimizers[name].state.get(value, {}).get("momentum_buffer")
        return torch.zeros_like(value) if kept is None else kept


RULES: dict[str, type[OuterRule]] = {
    "local_sgd": Averaging,
    "bmuf": BlockFilter,
    "diloco": OuterSGD,
}


class PlainReplicas:
    """All replicas, from the weights that they begin with.

    Args:
        name: of the method.
        options: of the method: `period`, `delay` and those of its outer step.
        weights: with which all begin.
        parts: the names of the weights that are exchanged together, in the order of turns.
        means: what an exchange gives, by the step after which it does.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        weights: Weights,
        parts: Sequence[Sequence[str]],
        means: Mapping[int, MeanDifference],
    ):
        self.rule, self._parts, self._means = RULES[name](options, weights), parts, means
        self._period, self._delay = int(options["period"]), int(options["delay"])
        # part -> what each replica sent, the mean of differences
        self._travelling: dict[int, tuple[list[dict[str, Tensor]], Weights]] = {}

    @torch.no_grad()
    def after(self, step: int, replicas: Sequence[Weights]) -> None:
        """All replicas have taken their `step`-th step, counted from 1, and have these weights,
        which are changed in place."""
        mean = [each for begins, each in self._means.items() if begins < step][-1]
        for number, names in enumerate(self._parts):
            turn = (number + 1) * self._period // len(self._parts)
            if step >= turn and (step - turn) % self._period == 0:
                sent = [{name: weights[name].clone() for name in names} for weights in replicas]
                anchor = {name: self.rule.anchor[name] for name in names}
                self._travelling[number] = sent, mean(number, anchor, sent)
            arrives = step - self._delay
            if arrives >= turn and (arrives - turn) % self._period == 0:
                self._arrive(replicas, *self._travelling.pop(number))

    def _arrive(
        self, replicas: Sequence[Weights], sent: Sequence[Weights], differences: Weights
    ) -> None:
        for name, difference in differences.items():
            self.rule.move(name, difference)
            for weights, own in zip(replicas, sent, strict=True):
                meanwhile = weights[name] - own[name]
                weights[name].copy_(self.rule.anchor[name] + meanwhile)

    def state(self, replica: int) -> dict[str, Tensor]:
        """What a replica keeps of exchanges, by name: of the part under way also what it sent, and
        the mean of the differences."""
        found: dict[str, Tensor] = {}
        for name, anchor in self.rule.anchor.items():
            found[f"{name}/anchor"] = anchor.detach().clone()
            momentum = self.rule.momentum(name)
            if momentum is not None:
                found[f"{name}/momentum"] = momentum.clone()
        for sent, differences in self._travelling.values():
            for name, difference in differences.items():
                found[f"{name}/sent"] = sent[replica][name]
                found[f"{name}/arrived"] = difference
        return found


def part_faults(parts: Sequence[Sequence[str]], weights: Iterable[str]) -> list[str]:
    """What is wrong with parts of a model: each weight that is trained is in one of them."""
    counts = Counter(name for part in parts for name in part)
    return [f"{name} is in {counts[name]} parts" for name in weights if counts[name] != 1]


def mean_difference(number: int, anchor: Weights, sent: Sequence[Weights]) -> Weights:
    """The mean over replicas, as it is."""
    return {
        name: value.detach() - sum(each[name] for each in sent) / len(sent)
        for name, value in anchor.items()
    }
