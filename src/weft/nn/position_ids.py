"""How a model numbers the positions of its tokens where it is not told."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_NUMBERING = "create_position_ids_from_input_ids"  # transformers' name (RoBERTa and its like)


class PositionNumbers:
    """From 0 up; or as an embedding of the model counts tokens that are not padding."""

    def __init__(self, model: nn.Module):
        found = (m for m in model.modules() if hasattr(m, _NUMBERING) and hasattr(m, "padding_idx"))
        self._counts: Any = next(found, None)

    def __call__(self, samples: int, length: int, device: torch.device, ids: Any) -> Tensor:
        """int64 [samples, length]. `ids`: the tokens, of the same shape, or None."""
        if self._counts is not None and ids is not None:
            numbers: Tensor = getattr(self._counts, _NUMBERING)(ids, self._counts.padding_idx)
            return numbers
        return torch.arange(length, device=device).expand(samples, length)
