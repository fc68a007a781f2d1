"""How many positions a batch has, and how a model numbers them where it is not told."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_NUMBERING = "create_position_ids_from_input_ids"  # transformers' name (RoBERTa and its like)


def sequence_length(names: Iterable[str], batch: Mapping[str, Tensor]) -> int:
    """Positions of a sequence: dim 1 of the first entry of tokens [samples, positions]; without
    one, of the first [samples, positions] or [samples, positions, features]. 0: there is none, as
    of images, whose dim 1 counts channels.

    Args:
        names: of entries, those that come first.
        batch: a batch of samples.
    """
    entries = [batch[key] for key in dict.fromkeys((*names, *batch)) if key in batch]
    sequences = [t for t in entries if t.ndim in (2, 3)]
    tokens = [t for t in sequences if t.ndim == 2 and not t.is_floating_point()]
    return next((t.shape[1] for t in (*tokens, *sequences)), 0)


class PositionNumbers:
    """From 0 up; or as an embedding of the model counts tokens that are not padding."""

    def __init__(self, model: nn.Module):
        found = (m for m in model.modules() if hasattr(m, "padding_idx") and _numbering(m))
        self._counts = next(found, None)

    def __call__(self, samples: int, length: int, device: torch.device, ids: Any) -> Tensor:
        """int64 [samples, length]. `ids`: the tokens, of the same shape, or None."""
        if self._counts is not None and ids is not None:
            numbers: Tensor = _numbering(self._counts)(ids, self._counts.padding_idx)
            return numbers
        return torch.arange(length, device=device).expand(samples, length)


def _numbering(module: nn.Module) -> Any:
    """Its function of tokens and the padding's: its own, or one beside its class that it calls."""
    own, kind = getattr(module, _NUMBERING, None), type(module)
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    if own is not None or code is None or _NUMBERING not in code.co_names:
        return own
    return getattr(sys.modules[kind.__module__], _NUMBERING, None)
