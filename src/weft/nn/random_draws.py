"""torch's functions that draw random numbers, made of numbers that do not depend on the layout.

Each function gets its numbers from `Draws`, which give every element a value of its place in the
whole microbatch (`dropout_rng.py`): so all ranks see one set of draws, as with dropout. The
transformations are the usual ones: inversion, and Box and Muller (1958) for the normal
distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Uniform = Callable[[torch.Size, torch.device, bool], Tensor]


@dataclass(frozen=True)
class Draws:
    """`uniform(shape, device, alike)`: float64 in [0, 1) of this shape, other ones at every call.
    `alike`: whether the shape is that of a tensor of the model, and not written out by it."""

    uniform: Uniform

    def normal(self, shape: torch.Size, device: torch.device, alike: bool) -> Tensor:
        radius = (-2.0 * torch.log1p(-self.uniform(shape, device, alike))).sqrt()
        return radius * torch.cos(2.0 * math.pi * self.uniform(shape, device, alike))


def _made(
    size: Any, kwargs: Mapping[str, Any], values: Callable[[torch.Size, torch.device], Tensor]
) -> Tensor:
    """A new tensor, as torch's factories make it."""
    device = kwargs.get("device")
    device = torch.get_default_device() if device is None else torch.device(device)
    found = values(torch.Size(size), device).to(kwargs.get("dtype") or torch.get_default_dtype())
    if kwargs.get("out") is not None:
        return kwargs["out"].resize_(found.shape).copy_(found)
    return found.requires_grad_() if kwargs.get("requires_grad") else found


def _size(args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Of `rand(2, 3)`, `rand((2, 3))` and `rand(size=(2, 3))`."""
    if "size" in kwargs:
        return kwargs["size"]
    return args if all(isinstance(n, int) for n in args) else args[0]


def _like(x: Tensor, kwargs: Mapping[str, Any], values: Tensor) -> Tensor:
    return _made(
        x.shape,
        {"dtype": x.dtype, "device": x.device} | {k: v for k, v in kwargs.items() if v is not None},
        lambda shape, device: values.to(device),
    )


def _rand(draws: Draws, *args: Any, **kwargs: Any) -> Tensor:
    return _made(_size(args, kwargs), kwargs, lambda s, d: draws.uniform(s, d, False))


def _randn(draws: Draws, *args: Any, **kwargs: Any) -> Tensor:
    return _made(_size(args, kwargs), kwargs, lambda s, d: draws.normal(s, d, False))


def _rand_like(draws: Draws, input: Tensor, **kwargs: Any) -> Tensor:
    return _like(input, kwargs, draws.uniform(input.shape, input.device, True))


def _randn_like(draws: Draws, input: Tensor, **kwargs: Any) -> Tensor:
    return _like(input, kwargs, draws.normal(input.shape, input.device, True))


def _whole_numbers(uniform: Tensor, low: int, high: int) -> Tensor:
    return (uniform * (high - low)).floor() + low


def _randint(draws: Draws, *args: Any, **kwargs: Any) -> Tensor:
    low, high, size = _bounds(args, kwargs, ("low", "high", "size"))
    kwargs = {"dtype": torch.int64} | {k: v for k, v in kwargs.items() if v is not None}
    return _made(size, kwargs, lambda s, d: _whole_numbers(draws.uniform(s, d, False), low, high))


def _randint_like(draws: Draws, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    low, high = _bounds(args, kwargs, ("low", "high"))
    uniform = draws.uniform(input.shape, input.device, True)
    return _like(input, kwargs, _whole_numbers(uniform, low, high))


def _bounds(args: tuple, kwargs: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    """The arguments of these names, taken out of `kwargs`; `low` may be left out."""
    given = sum(name in kwargs for name in names)
    absent = [name for name in names if name not in kwargs]
    if len(args) + given < len(names):
        absent = [name for name in absent if name != "low"]
    found = {"low": 0, **dict(zip(absent, args, strict=False))}
    found |= {name: kwargs.pop(name) for name in names if name in kwargs}
    return [found[name] for name in names]


def _normal(
    draws: Draws, mean: Any = 0.0, std: Any = 1.0, size: Any = None, **kwargs: Any
) -> Tensor:
    if size is not None:
        return _made(size, kwargs, lambda s, d: mean + std * draws.normal(s, d, False))
    given = [t for t in (mean, std) if isinstance(t, Tensor)]
    shape = torch.broadcast_shapes(*(t.shape for t in given))
    values = draws.normal(shape, given[0].device, True) * std + mean
    return values.detach().to(given[0].dtype)


def _bernoulli(draws: Draws, input: Tensor, p: float | None = None, **kwargs: Any) -> Tensor:
    uniform = draws.uniform(input.shape, input.device, True)
    return (uniform < (input.detach() if p is None else p)).to(input.dtype)


def _multinomial(
    draws: Draws, input: Tensor, num_samples: int, replacement: bool = False, **kwargs: Any
) -> Tensor:
    weights = input.detach().double()
    if weights.ndim == 2 and (num_samples == 1 or not replacement):
        uniform = draws.uniform(input.shape, input.device, True)
        times = -torch.log1p(-uniform.clamp_min(2.0**-54))
        # who comes first in a race of exponentials is drawn first (Efraimidis and Spirakis 2006)
        found = (weights / times).topk(num_samples).indices
    elif num_samples == 1 or replacement:
        rows, written = input.shape[:-1], weights.ndim == 1
        place = draws.uniform(torch.Size((*rows, num_samples)), input.device, not written)
        below = weights.cumsum(-1)
        found = torch.searchsorted(below, place * below[..., -1:], right=True)
        found = found.clamp(max=input.shape[-1] - 1)
    else:  # of all samples together, where they are as many: torch draws, and weft notices
        return torch.multinomial(input, num_samples, replacement, **kwargs)
    return found if kwargs.get("out") is None else kwargs["out"].resize_(found.shape).copy_(found)


def _fill(x: Tensor, values: Tensor) -> Tensor:
    return x.copy_(values)


def _normal_(draws: Draws, x: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    return _fill(x, draws.normal(x.shape, x.device, True) * std + mean)


def _log_normal_(draws: Draws, x: Tensor, mean: float = 1.0, std: float = 2.0, **_: Any) -> Tensor:
    return _fill(x, (draws.normal(x.shape, x.device, True) * std + mean).exp())


def _uniform_(draws: Draws, x: Tensor, *bounds: float, **kwargs: Any) -> Tensor:
    low = kwargs.get("from", bounds[0] if bounds else 0.0)
    high = kwargs.get("to", bounds[1] if len(bounds) > 1 else 1.0)
    return _fill(x, draws.uniform(x.shape, x.device, True) * (high - low) + low)


def _bernoulli_(draws: Draws, x: Tensor, p: Any = 0.5, **_: Any) -> Tensor:
    return _fill(x, (draws.uniform(x.shape, x.device, True) < p).to(x.dtype))


def _exponential_(draws: Draws, x: Tensor, lambd: float = 1.0, **_: Any) -> Tensor:
    return _fill(x, -torch.log1p(-draws.uniform(x.shape, x.device, True)) / lambd)


# what weft draws itself; a forward that draws in another way is refused on several ranks
DRAWS: Mapping[Callable, Callable[..., Tensor]] = {
    torch.rand: _rand,
    torch.randn: _randn,
    torch.rand_like: _rand_like,
    torch.randn_like: _randn_like,
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.normal: _normal,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    torch.multinomial: _multinomial,
    Tensor.multinomial: _multinomial,
    Tensor.normal_: _normal_,
    Tensor.log_normal_: _log_normal_,
    Tensor.uniform_: _uniform_,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.exponential_: _exponential_,
}

# functions in Python that call one of these
DRAWS_INSIDE: frozenset[Any] = frozenset({F.gumbel_softmax})
