"""What a model returns and its loss does not use: no gradient of it is sent between stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .structures import map_tensors


def unread_outputs(output: Any, loss: Callable[[Any], Tensor]) -> frozenset[int]:
    """The places, among the tensors of an output in order, of those on which the loss does not
    depend; none where the loss does not run on it."""
    leaves = list[Tensor]()

    def leaf(t: Tensor) -> Tensor:
        leaves.append(t.detach().requires_grad_(t.is_floating_point() or t.is_complex()))
        return leaves[-1]

    try:
        total = loss(map_tensors(output, leaf))
        asked = {i: t for i, t in enumerate(leaves) if t.requires_grad}
        grads = torch.autograd.grad(total, list(asked.values()), allow_unused=True)
    except Exception:  # whatever the code of a user raises, as on tensors without elements
        return frozenset()
    return frozenset(i for i, grad in zip(asked, grads, strict=True) if grad is None)
