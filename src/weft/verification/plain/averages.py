"""A moving average of weights, by its definition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class PlainAverages:
    """Of named weights, beginning with what they are now.

    Args:
        weights: those that are trained.
        keeps: the share of an average that stays in a step.
        grows: whether that share is at most (1 + n) / (10 + n) after step n, the first of which
            is 1.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], keeps: float, grows: bool):
        self.weights, self.keeps, self.grows = weights, keeps, grows
        self.values = {name: weight.detach().clone() for name, weight in weights.items()}

    def add(self, n: int) -> None:
        """After step n."""
        keeps = self.keeps
        if self.grows and keeps * (10 + n) > 1 + n:
            keeps = (1 + n) / (10 + n)
        for name, weight in self.weights.items():
            self.values[name] = self.values[name] * keeps + weight.detach() * (1.0 - keeps)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with them."""
        own = {name: weight.data for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            weight.data = self.values[name]
        try:
            yield
        finally:
            for name, weight in self.weights.items():
                weight.data = own[name]

    def state(self) -> dict[str, Tensor]:
        """By the names that a checkpoint has."""
        return {f"ema/{name}": torch.clone(value) for name, value in self.values.items()}
