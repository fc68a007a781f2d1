"""The scales of codecs that send one for each block of elements."""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4  # a float32


def read_scales(message: Tensor) -> Tensor:
    """The float32 numbers in these bytes of a message, which need not be aligned."""
    return message.contiguous().clone().view(torch.float32)
