"""The branches of a forward: a trial takes those of its sample, and then each other one, which
other tokens may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.pipeline import model_frames, quoted_line

from .context_parallel.transformers_interfaces import makes_a_mask

MOST = 4  # other branches that are tried; each takes as long as a trial

_READS = {
    *(Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero, Tensor.__contains__),
    *(Tensor.equal, torch.equal, Tensor.allclose, torch.allclose),
}


@dataclass(frozen=True)
class Branch:
    """What a line of the model reads of a tensor when it first runs.

    Attributes:
        line: its text, and where it is.
        value: true or false.
    """

    line: str
    value: bool


class BranchReads:
    """What a forward reads of tensors as true or false, but for what decides how transformers makes
    a mask: a part of the positions gets its rule from weft.

    Args:
        forced: the branch that it takes, whatever its tensors hold.

    Attributes:
        found: line -> what it read first.
    """

    def __init__(self, forced: Branch | None):
        self._forced = forced
        self.found: dict[str, bool] = {}

    def sees(self, func: Callable, args: tuple) -> bool:
        """Whether a function of torch gives Python true or false."""
        if func is Tensor.item:
            return args[0].dtype == torch.bool
        return func in _READS

    def __call__(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
        frame, forced = next(model_frames(), None), self._forced
        line = ""
        if frame is not None and not makes_a_mask(frame):
            line = quoted_line(frame.f_code, frame.f_lineno)
        if not line or line in self.found:
            return func(*args, **kwargs)
        value = func(*args, **kwargs) if forced is None or line != forced.line else forced.value
        self.found[line] = value
        return value

    def others(self) -> list[Branch]:
        """The branches that the forward has not taken."""
        return [Branch(line, not value) for line, value in self.found.items()][:MOST]
