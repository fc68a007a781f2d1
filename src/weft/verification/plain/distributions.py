"""Which distribution torch's functions draw from: what they draw, brought to a standard one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# (numbers, the probability that one is below each of these), where any number is possible; or
# (numbers, their mean, their standard deviation), where few are
Continuous = tuple[Tensor, Callable[[Tensor], Tensor]]
Discrete = tuple[Tensor, float, float]


def distribution_of(
    func: Callable, found: Tensor, args: tuple, kwargs: dict
) -> Continuous | Discrete | None:
    """Of what `func(*args, **kwargs)` drew. None where the arguments do not tell."""
    if func in (torch.randint, torch.randint_like):
        bounds = [n for n in args if isinstance(n, int)]
        bounds += [kwargs[name] for name in ("low", "high") if name in kwargs]
        low, high = (0, *bounds)[-2:]
        return found, (low + high - 1) / 2, math.sqrt(((high - low) ** 2 - 1) / 12)
    given = _Arguments(args if func is torch.normal else args[1:], kwargs)
    if func in (torch.bernoulli, Tensor.bernoulli) and given.of(0, "p", None) is None:
        p = args[0].detach().double()
        inner = (p > 0.01) & (p < 0.99)
        return (found.double() - p)[inner] / (p * (1 - p)).sqrt()[inner], 0.0, 1.0
    if func in (torch.multinomial, Tensor.multinomial):
        again = given.of(1, "replacement", False)
        return _of_likeliest(found if again else found[..., :1], args[0].detach().double())
    if func is Tensor.bernoulli_ and isinstance(p := given.of(0, "p", 0.5), float) and 0 < p < 1:
        return found, p, math.sqrt(p * (1 - p))
    if not found.is_floating_point():
        return None
    shift, scale = 0.0, 1.0
    values, below = found.detach().double(), _below_in_uniform
    if func in (torch.randn, torch.randn_like):
        below = _below_in_normal
    elif func in (torch.normal, Tensor.normal_):
        shift, scale, below = given.of(0, "mean", 0.0), given.of(1, "std", 1.0), _below_in_normal
    elif func is Tensor.log_normal_:
        shift, scale, below = given.of(0, "mean", 1.0), given.of(1, "std", 2.0), _below_in_normal
        values = values.log()
    elif func is Tensor.exponential_:
        scale, below = 1.0 / given.of(0, "lambd", 1.0), _below_in_exponential
    elif func is Tensor.uniform_:
        shift = given.of(0, "from", 0.0)
        scale = given.of(1, "to", 1.0) - shift
    elif func not in (torch.rand, torch.rand_like):
        return None
    return ((values - shift) / scale, below) if _nowhere_zero(scale) else None


def _of_likeliest(found: Tensor, weights: Tensor) -> Discrete:
    """Whether each is the likeliest, brought to mean 0 and standard deviation 1."""
    most, which = (weights / weights.sum(-1, keepdim=True)).max(-1, keepdim=True)
    inner = ((most > 0.01) & (most < 0.99)).expand(found.shape)
    return (((found == which).double() - most) / (most * (1 - most)).sqrt())[inner], 0.0, 1.0


def _nowhere_zero(scale: Any) -> bool:
    return bool((scale != 0).all()) if isinstance(scale, Tensor) else scale != 0


def _below_in_uniform(x: Tensor) -> Tensor:
    return x.clamp(0.0, 1.0)


def _below_in_normal(x: Tensor) -> Tensor:
    return torch.special.ndtr(x)


def _below_in_exponential(x: Tensor) -> Tensor:
    return 1.0 - torch.exp(-x.clamp(min=0.0))


class _Arguments:
    def __init__(self, args: tuple, kwargs: dict):
        self.args, self.kwargs = args, kwargs

    def of(self, place: int, name: str, default: Any) -> Any:
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)
