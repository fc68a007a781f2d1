"""Which dim counts samples in what a forward drops out: [samples, positions, features], or
[positions, samples, features]. A shape alone may not tell, as of as many positions as samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft._torch.tensors import fake_mode
from weft._torch.trees import tree_leaves
from weft.nn import DRAWS, DROPOUTS, may_drop

from .plan_request import PlanRequest
from .without_elements import copy_without_elements, without_elements


def positions_come_first(request: PlanRequest) -> bool:
    """Whether some dropout gets positions before samples: two runs on tensors without elements, one
    of them with twice the samples, tell. Without a sample, or where the forward does not run so,
    torch's own modules do."""
    model = request.model
    if not (request.sample and may_drop(model)):
        return _takes_positions_first(model)
    mode, few = fake_mode(), request.sample
    many = {key: torch.cat([t, t]) if t.ndim else t for key, t in few.items()}
    seen = []
    try:
        bare = copy_without_elements(model, mode).train()
        for batch in (few, many):
            shapes = _DroppedShapes()
            with without_elements(mode), shapes:
                bare(**replace(request, sample=batch).arguments())
            seen.append(shapes.found)
        both = list(zip(*seen, strict=True))
    except Exception:  # the trial before the first step says what does not run
        return _takes_positions_first(model)
    return any(
        len(one) == 3 and one[0] == two[0] and 2 * one[1] == two[1] and one[2] == two[2]
        for one, two in both
    )


def _takes_positions_first(model: nn.Module) -> bool:
    return any(
        isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and not module.batch_first
        for module in model.modules()
    )


class _DroppedShapes(TorchFunctionMode):
    """The shapes of tensors that are dropped out, or that random numbers are drawn after."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, ...]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in DROPOUTS or func in DRAWS:
            self.found += [tuple(t.shape) for t in tree_leaves((args, kwargs or {}), Tensor)[:1]]
        return func(*args, **(kwargs or {}))
