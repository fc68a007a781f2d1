"""The part of a tensor that a rank holds."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.core import DimShard


def shard_of(tensor: Tensor, cut: DimShard, index: int, size: int) -> Tensor:
    """What rank `index` of `size` holds of a tensor that is cut."""
    pieces = [
        tensor.narrow(cut.dim, start, stop - start) for start, stop in cut.intervals(index, size)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, cut.dim)
