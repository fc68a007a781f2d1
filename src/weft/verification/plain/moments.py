"""Mean and standard deviation of what torch's functions draw."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# numbers, their mean, their standard deviation, whether few values are possible
Moments = tuple[Tensor, float, float, bool]
_UNIT = math.sqrt(1.0 / 12.0)


def moments_of(func: Callable, found: Tensor, args: tuple, kwargs: dict) -> Moments | None:
    """Of what `func(*args, **kwargs)` drew. None where a tensor of parameters or the arguments do
    not tell."""
    if func in (torch.rand, torch.rand_like):
        return found, 0.5, _UNIT, False
    if func in (torch.randn, torch.randn_like):
        return found, 0.0, 1.0, False
    if func in (torch.randint, torch.randint_like):
        bounds = [n for n in args if isinstance(n, int)]
        bounds += [kwargs[name] for name in ("low", "high") if name in kwargs]
        low, high = (0, *bounds)[-2:]
        return found, (low + high - 1) / 2, math.sqrt(((high - low) ** 2 - 1) / 12), True
    given = _Arguments(args if func is torch.normal else args[1:], kwargs)
    if func is Tensor.normal_:
        return _scaled(found, given.of(0, "mean", 0.0), given.of(1, "std", 1.0), 0.0, 1.0)
    if func is Tensor.log_normal_:
        return _scaled(found.log(), given.of(0, "mean", 1.0), given.of(1, "std", 2.0), 0.0, 1.0)
    if func is Tensor.uniform_:
        low, high = given.of(0, "from", 0.0), given.of(1, "to", 1.0)
        return _scaled(found, low, high - low, 0.5, _UNIT)
    if func is Tensor.exponential_:
        return _scaled(found, 0.0, 1.0 / given.of(0, "lambd", 1.0), 1.0, 1.0)
    if func is torch.normal:
        return _scaled(found, given.of(0, "mean", 0.0), given.of(1, "std", 1.0), 0.0, 1.0)
    if func in (torch.bernoulli, Tensor.bernoulli) and given.of(0, "p", None) is None:
        p = args[0].detach().double()
        inner = (p > 0.01) & (p < 0.99)
        of_inner = (found.double() - p)[inner] / (p * (1 - p)).sqrt()[inner]
        return of_inner, 0.0, 1.0, True
    if func is Tensor.bernoulli_ and isinstance(p := given.of(0, "p", 0.5), float) and 0 < p < 1:
        return found, p, math.sqrt(p * (1 - p)), True
    return None


def _scaled(found: Tensor, shift: Any, scale: Any, mean: float, deviation: float) -> Moments | None:
    values = found.detach().double()
    if isinstance(scale, Tensor) and not bool((scale != 0).all()):
        return None
    if not isinstance(scale, Tensor) and scale == 0:
        return None
    return (values - shift) / scale, mean, deviation, False


class _Arguments:
    def __init__(self, args: tuple, kwargs: dict):
        self.args, self.kwargs = args, kwargs

    def of(self, place: int, name: str, default: Any) -> Any:
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)
