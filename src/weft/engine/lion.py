"""Lion: steps by the sign of a momentum (Chen et al. 2023, Symbolic Discovery of Optimization
Algorithms)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .grad_buckets import local_tensor
from .optimizers import elementwise


@elementwise
class Lion(torch.optim.Optimizer):
    """Half of AdamW's state: one momentum. Every element moves by `lr`, so rates are 3 to 10 times
    smaller than AdamW's, and weight decay that much larger.

    Args:
        params: parameters, (name, parameter) pairs, or groups of either.
        lr: step of each element.
        betas: weight of the momentum in the update, and in the next momentum.
        weight_decay: decoupled, as in AdamW.

    Example:
        >>> p = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
        >>> p.grad = torch.tensor([0.3, -20.0])
        >>> Lion([p], lr=0.25).step()
        >>> p.tolist()
        [0.75, 1.25]
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ):
        if lr < 0 or weight_decay < 0:
            raise ValueError(f"lr and weight_decay are at least 0, and not {lr}, {weight_decay}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas are two numbers from 0 to below 1, and not {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            together: dict[tuple, list[tuple[Tensor, Tensor, Tensor]]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                weight, state = local_tensor(p), self.state[p]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(weight)
                one = weight, local_tensor(p.grad), state["exp_avg"]
                together.setdefault((weight.device, weight.dtype), []).append(one)
            for members in together.values():
                weights, grads, momenta = map(list, zip(*members, strict=True))
                _update(weights, grads, momenta, group)
        return loss


def _update(
    weights: list[Tensor], grads: list[Tensor], momenta: list[Tensor], group: dict[str, Any]
) -> None:
    lr, (now, later), decay = float(group["lr"]), group["betas"], group["weight_decay"]
    steps = torch._foreach_lerp(grads, momenta, now)
    torch._foreach_sign_(steps)
    if decay:
        torch._foreach_mul_(weights, 1 - lr * decay)
    torch._foreach_add_(weights, steps, alpha=-lr)
    torch._foreach_lerp_(momenta, grads, 1 - later)
