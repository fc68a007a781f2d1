"""Gradients that an optimizer's step leaves as they were, to be compared after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def keep_gradients(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer may change gradients in its step, as to clip or to scale them; what is compared
    is what it was given."""
    given: list[list[tuple[Tensor, Tensor]]] = []  # a step may call that of its base class

    def note(*step: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        given.append([(p.grad, p.grad.clone()) for p in params if p.grad is not None])

    def put_back(*step: Any) -> None:
        for grad, was in given.pop():
            grad.copy_(was)

    optimizer.register_step_pre_hook(note)
    optimizer.register_step_post_hook(put_back)
