"""Moments that an optimizer keeps as codes of 8 bits, as the numbers that they stand for: of a
block that is rounding alone, any code stands for next to nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .plain.optimizers import BLOCK, code_values, scale_of_each


class Moments:
    """The codes among a run's state.

    Args:
        final: of one device, by name.
    """

    def __init__(self, final: Mapping[str, Tensor]):
        self._scales = {
            name: scale_of_each(final[f"{name}_scale"], codes.shape[-1])
            for name, codes in final.items()
            if _are_codes(name, codes, final.get(f"{name}_scale"))
        }
        self.sizes = {
            name: self.shares(name, final[name]) * scale for name, scale in self._scales.items()
        }

    def shares(self, name: str, codes: Tensor) -> Tensor:
        """What these codes are of the largest of their blocks; anything but codes as it is."""
        if name not in self._scales or codes.dtype != torch.uint8:
            return codes
        return code_values(name.rpartition("/")[2])[codes.long()]

    def times(self, name: str) -> Tensor | None:
        """One device's scale of each element. Scales are state, too, and compared by themselves."""
        return self._scales.get(name)


def _are_codes(name: str, kept: Tensor, scales: Tensor | None) -> bool:
    """Whether these are codes of AdamW8bit: another optimizer's may stand for other numbers."""
    of_moment = name.startswith("optimizer/") and name.endswith(("/exp_avg", "/exp_avg_sq"))
    if not of_moment or kept.dtype != torch.uint8 or scales is None or not kept.ndim:
        return False
    return scales.shape == (*kept.shape[:-1], -(-kept.shape[-1] // BLOCK))
