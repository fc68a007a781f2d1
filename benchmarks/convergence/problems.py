"""Problems whose smoothness and noise are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

RUNS = 32  # independent runs, whose mean stands for the expectation
DIM = 50  # of one run's weights
SIGMA2 = 4.0  # expected squared norm of the noise of one sample's gradient
START = 1.0  # every weight's at the beginning


def curvatures() -> Tensor:
    """[DIM], from 0.05 to 1."""
    return torch.linspace(0.05, 1.0, DIM, dtype=torch.float64)


def quadratic(w: Tensor) -> Tensor:
    """[..., DIM] -> [...]: half the sum of c w^2. Smoothness: the largest c. Least value 0."""
    return 0.5 * (curvatures() * w**2).sum(-1)


def bumps(w: Tensor) -> Tensor:
    """[..., DIM] -> [...]: half the sum of c w^2 / (1 + w^2), not convex: its second derivative
    goes from c at 0 to
    -c / 4 at 1. Smoothness: the largest c. Least value 0."""
    return 0.5 * (curvatures() * w**2 / (1 + w**2)).sum(-1)


PROBLEMS: dict[str, Callable[[Tensor], Tensor]] = {"quadratic": quadratic, "not convex": bumps}
SMOOTHNESS = float(curvatures().max())


class Noisy(nn.Module):
    """RUNS copies of a problem side by side, each with weights of its own. A sample's value is that
    of all of them, and its gradient is off by the sample's noise."""

    def __init__(self, value: Callable[[Tensor], Tensor]):
        super().__init__()
        self.value = value
        self.w = nn.Parameter(torch.full((RUNS, DIM), START, dtype=torch.float64))

    def forward(self, noise: Tensor) -> Tensor:
        """[samples, RUNS, DIM] -> [samples]"""
        return self.value(self.w).sum() + (noise * self.w).sum((-2, -1))

    def norms(self) -> Tensor:
        """[RUNS]: squared norm of the gradient without noise."""
        w = self.w.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.value(w).sum(), w)
        return gradient.square().sum(-1)


def mean_value(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """A loss of weft: sum, and how many count."""
    return output.sum(), torch.tensor(float(len(output)), dtype=output.dtype)
