"""Norms by the root mean square of all features (Zhang and Sennrich 2019), with a part of these on
each rank: only the mean of squares needs the others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_EPSILONS = ("eps", "variance_epsilon", "epsilon", "norm_eps")
_FEATURES = 8  # of the weight that a module is tried with


@dataclass(frozen=True)
class RMSRule:
    """x / sqrt(mean(x^2) + eps) * (offset + weight). `eps`: None is that of the dtype of x."""

    eps: float | None
    offset: float


def rms_rule(module: nn.Module) -> RMSRule | None:
    """The rule by which a module computes; None if that is no norm by the root mean square. Told
    by what it makes of some numbers, whatever it is called."""
    if type(module) is nn.RMSNorm:
        whole = len(module.normalized_shape) == 1 and module.weight is not None
        return RMSRule(module.eps, 0.0) if whole else None
    held = dict(module.named_parameters())
    if list(held) != ["weight"] or held["weight"].ndim != 1 or any(True for _ in module.buffers()):
        return None
    numbers = [vars(module).get(name) for name in _EPSILONS]
    eps = next((number for number in numbers if isinstance(number, float)), None)
    if eps is None:
        return None
    draw = torch.Generator().manual_seed(0)
    options = {"generator": draw, "dtype": torch.float64, "device": "cpu"}
    weight, x = torch.randn(_FEATURES, **options), torch.randn(3, _FEATURES, **options)
    # of the last row, eps is half of what is divided by
    x *= torch.tensor([[1.0], [10.0], [eps**0.5]], device="cpu")
    tried = copy.copy(module)
    tried._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    try:
        with torch.no_grad():
            made = tried.forward(x)
    except Exception:  # whatever code of other people raises: it is no such norm
        return None
    if not isinstance(made, Tensor) or made.shape != x.shape:
        return None
    for offset in (0.0, 1.0):
        want = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (offset + weight)
        if torch.allclose(made.double(), want, rtol=1e-4, atol=1e-5):
            return RMSRule(eps, offset)
    return None


class ShardedRMSNorm(nn.Module):
    """A norm over all features, of which the input has this rank's."""

    _rule: RMSRule
    _features: int
    _sum: Callable[[Tensor], Tensor]

    @staticmethod
    def take_over(
        module: nn.Module,
        rule: RMSRule,
        features: int,
        sum_over_ranks: Callable[[Tensor], Tensor],
    ) -> None:
        """Compute with a rank's features from now on.

        Args:
            module: with the parameter `weight`, changed in place.
            rule: that of the module.
            features: of all ranks.
            sum_over_ranks: of squares [..., 1], in forward and backward.
        """
        module.__class__ = ShardedRMSNorm
        module._rule, module._features = rule, features  # type: ignore[assignment]
        module._sum = sum_over_ranks  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """[..., features of this rank] -> the same shape."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = self._sum(wide.square().sum(-1, keepdim=True)) / self._features
        eps = torch.finfo(x.dtype).eps if self._rule.eps is None else self._rule.eps
        scale = self.weight + self._rule.offset if self._rule.offset else self.weight
        return (wide * (mean + eps).rsqrt()).to(x.dtype) * scale
