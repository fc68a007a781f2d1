"""Muon for hidden matrices, with AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan's quintic Newton-Schulz iteration


class JoinedOptimizer(torch.optim.Optimizer):
    """Several optimizers, each of its own parameters, that step together. Their groups and their
    state are those of this one, so learning rates and checkpoints need not know of them."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer], lr: float):
        self.parts: tuple[torch.optim.Optimizer, ...] = ()
        super().__init__([group for part in parts for group in part.param_groups], {"lr": lr})
        self.parts = tuple(parts)
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.state = self.state
            part.param_groups = [next(groups) for _ in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self._share()


class MuonWithAdamW(JoinedOptimizer):
    """torch.optim.Muon (Jordan et al. 2024) for matrices, torch.optim.AdamW for the rest:
    embeddings and the head, which `adamw` names, and whatever has not exactly two dims.

    Args:
        params: (name, parameter) pairs, or groups of them.
        lr: learning rate of Muon; a group's own is for all its parameters.
        weight_decay: decoupled, of both.
        momentum: of Muon.
        nesterov: whether Muon's momentum is Nesterov's.
        ns_coefficients: of the Newton-Schulz iteration.
        ns_steps: Newton-Schulz iterations.
        adjust_lr_fn: "original", or "match_rms_adamw": rates as for AdamW (Liu et al. 2025).
        adamw: globs of the matrices that AdamW updates.
        adamw_lr: learning rate of AdamW. Default: `lr`.
        adamw_betas: of AdamW.

    Example:
        >>> named = [
        ...     ("embedding.weight", torch.nn.Parameter(torch.zeros(4, 2))),
        ...     ("up.weight", torch.nn.Parameter(torch.zeros(2, 2))),
        ... ]
        >>> made = MuonWithAdamW(named, lr=0.02, adamw=["embedding.*"], adamw_lr=1e-3)
        >>> [(group["param_names"], group["lr"]) for group in made.param_groups]
        [(['up.weight'], 0.02), (['embedding.weight'], 0.001)]
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        adamw: Sequence[str] = (),
        *,
        adamw_lr: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
    ):
        own: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        beside: dict[str, Any] = {
            "lr": lr if adamw_lr is None else adamw_lr,
            "weight_decay": weight_decay,
            "betas": adamw_betas,
        }
        params = list(params)
        groups = params if params and isinstance(params[0], Mapping) else [{"params": params}]
        matrices: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        for group in groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            one: tuple[list, list] = [], []
            for name, p in group["params"]:
                hidden = p.ndim == 2 and not any(fnmatchcase(name, glob) for glob in adamw)
                one[not hidden].append((name, p))
            for members, found, keys in ((one[0], matrices, own), (one[1], others, beside)):
                if members:
                    mine = {key: value for key, value in settings.items() if key in keys}
                    found.append({"params": members, **mine})
        parts: list[torch.optim.Optimizer] = []
        if matrices:
            parts.append(torch.optim.Muon(matrices, **own))
        if others:
            parts.append(torch.optim.AdamW(others, **beside, fused=_fused(others)))
        super().__init__(parts, lr)


def _fused(groups: Sequence[Mapping[str, Any]]) -> bool:
    return all(
        p.is_floating_point() and p.device.type in ("cpu", "cuda")
        for group in groups
        for _, p in group["params"]
    )
