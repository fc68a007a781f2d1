"""weft's own optimizers by their definitions, one parameter after the other. State has the names
that it has in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from weft.engine import AdamW8bit, Lion, MuonWithAdamW

from .names import matches

BLOCK = 128  # elements of a row that share a scale
TINY = 1e-10  # above this part of the largest, a second moment does not become zero
DIGITS = 7


class PlainOptimizer(torch.optim.Optimizer):
    """An optimizer that looks at each parameter by itself."""

    def __init__(self, params: Any, **settings: Any):
        super().__init__(params, settings)

    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], settings: Any) -> None:
        """Change a weight."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)


class PlainLion(PlainOptimizer):
    """Chen et al. 2023, algorithm 2."""

    def __init__(self, params: Any, lr: float = 1e-4, **settings: Any):
        defaults = {"betas": (0.9, 0.99), "weight_decay": 0.0}
        super().__init__(params, lr=lr, **{**defaults, **settings})

    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], settings: Any) -> None:
        (now, later), before = settings["betas"], state.get("exp_avg", torch.zeros_like(weight))
        direction = (now * before + (1 - now) * grad).sign()
        weight -= settings["lr"] * (direction + settings["weight_decay"] * weight)
        state["exp_avg"] = later * before + (1 - later) * grad


class PlainAdamW8bit(PlainOptimizer):
    """AdamW (Loshchilov and Hutter 2019) that keeps its moments as codes of 8 bits, those of each
    block of a row relative to the largest (Dettmers et al. 2022). A vector's are kept as they
    are."""

    def __init__(self, params: Any, lr: float = 1e-3, **settings: Any):
        defaults = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
        super().__init__(params, lr=lr, **{**defaults, **settings})

    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], settings: Any) -> None:
        (first, second), lr = settings["betas"], settings["lr"]
        state["step"] = state.get("step", torch.zeros(())) + 1
        step = float(state["step"])
        mean = first * _kept(state, "exp_avg", weight) + (1 - first) * grad
        square = second * _kept(state, "exp_avg_sq", weight) + (1 - second) * grad * grad
        size = (square / (1 - second**step)).sqrt() + settings["eps"]
        weight -= lr * settings["weight_decay"] * weight
        weight -= lr * (mean / (1 - first**step)) / size
        _keep(state, "exp_avg", mean)
        _keep(state, "exp_avg_sq", square)


def _keep(state: dict[str, Any], key: str, moment: Tensor) -> None:
    if moment.ndim < 2:
        state[key] = moment
        return
    values = code_values(key).to(moment)
    between = torch.stack([(one + next_) / 2 for one, next_ in pairwise(values)])
    codes, scales = [], []
    for block in moment.split(BLOCK, -1):
        most = block.abs().amax(-1, keepdim=True)
        shares = torch.where(most > 0, block / most, 0.0)
        code = torch.searchsorted(between, shares.contiguous())
        if key == "exp_avg_sq":
            code = torch.where(shares > TINY, code.clamp(min=1), code)
        codes.append(code)
        scales.append(most)
    state[key] = torch.cat(codes, -1).to(torch.uint8)
    state[f"{key}_scale"] = torch.cat(scales, -1)


def _kept(state: dict[str, Any], key: str, like: Tensor) -> Tensor:
    if key not in state:
        return torch.zeros_like(like)
    if like.ndim < 2:
        found: Tensor = state[key]
        return found
    shares = code_values(key).to(like)[state[key].long()]
    return shares * scale_of_each(state[f"{key}_scale"], like.shape[-1])


def scale_of_each(scales: Tensor, length: int) -> Tensor:
    """Each block's scale for each of its elements, of rows of this length."""
    blocks = scales.split(1, -1)
    sizes = [min(BLOCK, length - place * BLOCK) for place in range(len(blocks))]
    return torch.cat(
        [scale.expand(*scale.shape[:-1], n) for scale, n in zip(blocks, sizes, strict=True)], -1
    )


def code_values(key: str) -> Tensor:
    """What the 256 codes stand for: zero, one, and for each decimal digit the middles of equal
    parts of 0.1 to 1, as many as the bits that are left tell apart. A second moment has no sign."""
    values, signed = [0.0, 1.0], key == "exp_avg"
    for digit in range(DIGITS):
        parts = 2 ** (DIGITS - digit - signed)
        for part in range(parts):
            value = (0.1 + 0.9 * (part + 0.5) / parts) * 10.0**-digit
            values += [value, -value] if signed else [value]
    return torch.tensor(sorted(values), dtype=torch.float64)


class Together:
    """Optimizers, each of its own parameters, that step together."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer], lr: float):
        self.parts, self.defaults = parts, {"lr": lr}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> Mapping[nn.Parameter, dict[str, Any]]:
        """What each parameter's optimizer keeps of it, to be changed in place."""
        groups = [(part, group) for part in self.parts for group in part.param_groups]
        return {p: part.state[p] for part, group in groups for p in group["params"]}

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for part, kept in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(kept)


def plain_muon(
    params: Sequence[Any],
    lr: float = 0.02,
    weight_decay: float = 0.1,
    adamw: Sequence[str] = (),
    adamw_lr: float | None = None,
    adamw_betas: tuple[float, float] = (0.9, 0.999),
    **muon: Any,
) -> Together:
    """torch's Muon for hidden matrices, which have two dims and are none of those that `adamw`
    names; torch's AdamW for the rest. A group's own settings are for those of its parameters whose
    optimizer has them."""
    parts = list[torch.optim.Optimizer]()
    for group, own in _groups(params):
        hidden = [(n, p) for n, p in group if len(p.shape) == 2 and not _any(adamw, n)]
        names = {name for name, _ in hidden}
        rest = [(name, p) for name, p in group if name not in names]
        if hidden:
            settings = {"lr": lr, "weight_decay": weight_decay, **muon}
            known = torch.optim.Muon([torch.zeros(1, 1)]).defaults
            settings |= {key: value for key, value in own.items() if key in known}
            parts.append(torch.optim.Muon(hidden, **settings))
        if rest:
            rate = lr if adamw_lr is None else adamw_lr
            settings = {"lr": rate, "weight_decay": weight_decay, "betas": adamw_betas}
            settings |= {key: value for key, value in own.items() if key in settings}
            parts.append(torch.optim.AdamW(rest, **settings))
    return Together(parts, lr)


def _groups(params: Sequence[Any]) -> Iterator[tuple[list[tuple[str, nn.Parameter]], dict]]:
    """Named parameters, with what is set for them alone."""
    listed = params if params and isinstance(params[0], dict) else [{"params": params}]
    for group in listed:
        yield list(group["params"]), {k: v for k, v in group.items() if k != "params"}


def _any(patterns: Sequence[str], name: str) -> bool:
    return any(matches(pattern, name) for pattern in patterns)


AnyOptimizer = torch.optim.Optimizer | Together
PLAIN: Mapping[Any, Callable[..., Any]] = {
    MuonWithAdamW: plain_muon,
    Lion: PlainLion,
    AdamW8bit: PlainAdamW8bit,
}
