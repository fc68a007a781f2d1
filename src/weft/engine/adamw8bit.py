"""AdamW whose two moments are 8-bit codes in blocks (Dettmers et al. 2022, 8-bit Optimizers via
Block-wise Quantization)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .grad_buckets import local_tensor
from .optimizers import elementwise

BLOCK = 128  # elements of one row that share a scale
TINY = 1e-10  # a second moment above this share of its block's largest is not rounded to 0


@elementwise
class AdamW8bit(torch.optim.Optimizer):
    """AdamW with 2 bytes of state per element in place of 8, and 8 bytes per block of 128.

    A block is 128 neighbours in the last dim of a tensor, so blocks do not depend on how rows are
    sharded; a parameter whose last dim a layout cuts inside a block is updated whole. Moments of
    parameters with one dim stay in the parameter's dtype.

    Args:
        params: parameters, (name, parameter) pairs, or groups of either.
        lr: learning rate.
        betas: decay of the first and the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled, as in AdamW.

    Example:
        >>> p = torch.nn.Parameter(torch.ones(2, 3))
        >>> p.grad = torch.ones(2, 3)
        >>> made = AdamW8bit([p], lr=0.5, weight_decay=0.0)
        >>> made.step()
        >>> p[0].tolist(), made.state[p]["exp_avg"].dtype
        ([0.5, 0.5, 0.5], torch.uint8)
    """

    # state that has one entry for each block of the last dim -> the length of a block
    blocks = {"exp_avg_scale": BLOCK, "exp_avg_sq_scale": BLOCK}  # noqa: RUF012

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ):
        if min(lr, eps, weight_decay) < 0:
            raise ValueError(f"lr, eps, weight_decay are at least 0: {lr}, {eps}, {weight_decay}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas are two numbers from 0 to below 1, and not {betas}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    _update(local_tensor(p), local_tensor(p.grad), self.state[p], group)
        return loss


def _update(weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            zeros = torch.zeros_like(weight, memory_format=torch.contiguous_format)
            _store(state, key, zeros, signed)
    (first, second), lr = group["betas"], float(group["lr"])
    state["step"] += 1
    step = float(state["step"])
    mean = _load(state, "exp_avg", weight, True).lerp_(grad, 1 - first)
    square = _load(state, "exp_avg_sq", weight, False)
    square.mul_(second).addcmul_(grad, grad, value=1 - second)
    root = square.sqrt().div_((1 - second**step) ** 0.5).add_(group["eps"])
    weight.mul_(1 - lr * group["weight_decay"])
    weight.addcdiv_(mean, root, value=-lr / (1 - first**step))
    _store(state, "exp_avg", mean, True)
    _store(state, "exp_avg_sq", square, False)


# ---- codes ---------------------------------------------------------------------------------------


def _store(state: dict[str, Any], key: str, moment: Tensor, signed: bool) -> None:
    """Keep a moment [..., n] as codes [..., n] and scales [..., n / 128]; of one dim, as it is."""
    if moment.ndim < 2:
        kept = {key: moment}
    else:
        scale = _largest(moment)
        table = _table(signed).to(moment.device, moment.dtype)
        share = moment / _spread(scale, moment.shape[-1]).clamp_(min=torch.finfo(moment.dtype).tiny)
        codes = torch.bucketize(share, (table[1:] + table[:-1]) / 2).to(torch.uint8)
        if not signed:  # a second moment that became 0 would let the first one explode
            codes.clamp_(min=(share > TINY).to(torch.uint8))
        kept = {key: codes, f"{key}_scale": scale}
    for name, value in kept.items():
        if name in state:
            state[name].copy_(value)
        else:
            state[name] = value


def _load(state: dict[str, Any], key: str, like: Tensor, signed: bool) -> Tensor:
    """The moment that `_store` kept, in a tensor of its own."""
    if like.ndim < 2:
        return state[key].clone()
    table = _table(signed).to(like.device, like.dtype)
    return table[state[key].int()] * _spread(state[f"{key}_scale"], like.shape[-1])


def _largest(moment: Tensor) -> Tensor:
    """The largest absolute value of each block; [..., n] -> [..., n / 128, rounded up]."""
    missing = -moment.shape[-1] % BLOCK
    padded = torch.nn.functional.pad(moment.abs(), (0, missing))
    return padded.unflatten(-1, (-1, BLOCK)).amax(-1)


def _spread(scale: Tensor, length: int) -> Tensor:
    """Each block's scale for each of its elements; [..., blocks] -> [..., length]."""
    return scale.repeat_interleave(BLOCK, dim=-1)[..., :length]


@lru_cache(maxsize=2)
def _table(signed: bool) -> Tensor:
    """The 256 values of a code, from -1 or 0 to 1: dynamic tree quantization, whose leading zero
    bits count decimal digits and whose other bits divide one digit evenly."""
    digits = 7
    values = [0.0, 1.0]
    for exponent in range(digits):
        count = 2 ** (exponent if signed else exponent + 1)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        middles = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (exponent - digits + 1)).tolist()
        values += middles + ([-middle for middle in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float64)
