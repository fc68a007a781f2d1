"""Parameters as one flat tensor, of which messages are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class FlatParams:
    """Plain tensors that this rank trains, with their names. A flat tensor [n] has one after the
    other."""

    names: Sequence[str]
    params: list[Tensor]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(p.shape) for p in self.params]

    def flat(self) -> Tensor:
        """The parameters, copied."""
        return torch.cat([p.detach().reshape(-1) for p in self.params])

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters' parts of a flat tensor."""
        parts = flat.split([p.numel() for p in self.params])
        return [part.view(p.shape) for part, p in zip(parts, self.params, strict=True)]
