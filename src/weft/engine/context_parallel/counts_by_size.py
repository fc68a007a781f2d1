"""Positions that a forward counts where nothing is followed: in a graph, in a loss, and in a stage,
which receives tensors of which nothing is known.

As many integers in a row as there are positions here are taken for theirs. Those of a model that is
given position_ids number something else. The trial finds one that counted other things.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class CountsBySize:
    """Calls functions of torch in a forward of a part of the positions.

    Args:
        mine: positions of this rank, int64 [positions here].
    """

    def __init__(self, mine: Tensor):
        self._mine = mine

    def __call__(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """What `func` gives for this rank's positions."""
        made = func(*args, **kwargs)
        if func is torch.arange:
            return self._numbered(made, args, kwargs)
        if func is torch.diff:
            return self._without_jumps(made, *args[:1], **kwargs)
        return made

    def _numbered(self, made: Tensor, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """`torch.arange`."""
        here = len(self._mine)
        asked = args[:1] == (here,) or args[:2] == (0, here) or kwargs.get("end") == here
        if not asked or made.shape != (here,) or made.is_floating_point():
            return made
        return self._mine.to(made.device, made.dtype)

    def _without_jumps(self, made: Tensor, input: Tensor, **options: Any) -> Tensor:
        """`torch.diff`, by which transformers finds where documents begin. Between this rank's two
        stretches lie positions of other ranks."""
        mine = self._mine.to(input.device)
        if input.is_floating_point() or input.shape[-1:] != mine.shape:
            return made
        here = torch.equal(input, mine.expand_as(input))
        if not here or not torch.equal(made[..., 1:], input.diff()):  # other numbers or another dim
            return made
        return torch.cat((made[..., :1], torch.ones_like(made[..., 1:])), -1)
