"""Elements of weights whose gradients are rounding alone: as of a bias before a norm, or of the
third of a fused bias that attention's keys get, which softmax does not see."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import torch
from torch import Tensor

from .difference import Bounds
from .reference import Reference

# below this part of all gradients, or an element below this part of the typical one of its weight,
# a gradient in float64 is what rounding left of zero
NOISE = 1e-12
# an optimizer that divides by the size of a gradient makes more of that
OF_NOISE = 1e-3
ALONE, FOLLOWS = "of rounding alone", "(follows rounding)"  # in the names of errors


class NoiseElements:
    """Finds them among the gradients of all steps."""

    def __init__(self) -> None:
        self._tiny: dict[str, Tensor] | None = None  # in every step until now
        self._reached: dict[str, Tensor] = {}  # elements that got one

    def add(self, gradients: Mapping[str, Tensor], norm: float) -> None:
        """The gradients of a step, and the norm of all of them."""
        found = {name: _tiny(gradient, norm) for name, gradient in gradients.items()}
        before = found if self._tiny is None else self._tiny
        self._tiny = {n: before[n] & mask for n, mask in found.items() if n in before}
        for name in self._tiny:
            reached = gradients[name] != 0
            self._reached[name] = reached | self._reached.get(name, reached)

    def masks(self) -> dict[str, Tensor]:
        """By weight. Zeros count where rounding left something of others: alone, as in the rows of
        an embedding that no token has, they are exact."""
        tiny = self._tiny or {}
        return {
            name: mask
            for name, mask in tiny.items()
            if mask.all() or (mask & self._reached[name]).any()
        }


def noise_of(reference: Reference, bounds: Bounds) -> dict[str, Tensor]:
    """By weight, which elements got a gradient that in no step was more than rounding leaves in
    float64."""
    found = NoiseElements()
    if bounds.precision == Bounds.precision:
        for gradients, norm in zip(reference.gradients, reference.norms, strict=True):
            found.add(gradients, norm)
    return found.masks()


def whole_of_noise(noise: Mapping[str, Tensor]) -> bool:
    """Whether it moves all of a weight, which buffers follow: the running mean of a batch norm
    follows the bias before it."""
    return any(bool(mask.all()) for mask in noise.values())


def from_rounding(name: str) -> bool:
    """Whether an error, by its name, is of such elements, or of what follows them. An optimizer
    that takes the sign of a gradient, as Lion, makes of it as much as of any other."""
    return ALONE in name or FOLLOWS in name


def _tiny(gradient: Tensor, norm: float) -> Tensor:
    size = float(gradient.abs().norm())
    if size < NOISE * norm:
        return torch.ones_like(gradient, dtype=torch.bool)
    return gradient.abs() < NOISE * size / sqrt(max(1, gradient.numel()))
