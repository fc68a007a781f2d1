"""A loss that fails on one rank, in a step that all ranks are in.

What it raises is kept: backward runs with zeros in its place, so that no rank is waited for. Its
weight is not a number, and neither is the sum of weights that all ranks make before they update.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft._torch.trees import tree_leaves
from weft.core import Refusal, StepFailed, gather_json
from weft.nn import weighed_loss

from ..microbatch import Batch

_TORCH = Path(torch.__file__).parent


class LossFailure:
    """Of one step of one rank."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def or_zero(self, loss: Callable[..., Any], output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """What the loss returns, (sum, weight); where it fails, (zero, not a number)."""
        try:
            return weighed_loss(loss, output, batch)
        except Refusal:
            raise
        except Exception as error:  # a user's function may fail in any way
            roots = [leaf for leaf in tree_leaves(output, Tensor) if leaf.requires_grad]
            if not roots:
                raise
            self._error = self._error or error
            zero = torch.stack([root.sum() for root in roots]).sum() * 0.0
            return zero, torch.full_like(zero, torch.nan, requires_grad=False)

    def error(self, step: int, rank: int, group: dist.ProcessGroup | None) -> StepFailed | None:
        """What all ranks of the group raise, if the loss of one has failed in this step. All call
        it together."""
        own = None if self._error is None else [rank, _described(self._error)]
        everyone = [own] if group is None else gather_json(own, group)
        found = next((each for each in everyone if each is not None), None)
        if found is None:  # a loss has returned such a weight
            return None
        where, said = found
        failed = StepFailed(f"the loss failed in step {step} on rank {where}: {said}")
        failed.__cause__ = self._error
        return failed


def _described(error: Exception) -> str:
    """One line: the error, and the last line of code that is not torch's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _TORCH not in Path(frame.filename).parents]
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return " ".join(f"{type(error).__name__}: {error}".split()) + place
