"""The message of codecs that send some elements of a tensor, each with its place."""

from __future__ import annotations

import torch
from torch import Tensor

ELEMENT_BYTES = 8  # a float32 and an int32
SAMPLE = 2**14  # elements from which a first threshold is estimated


def largest_places(x: Tensor, count: int) -> Tensor:
    """The places of the `count` largest magnitudes of x [n]. Only elements above a threshold, which
    is estimated from a sample of x, are sorted (Lin et al. 2018)."""
    sizes, n = x.abs(), x.numel()
    if n > 8 * SAMPLE and count < n // 8:
        sample = sizes[:: n // SAMPLE]
        keep = min(sample.numel(), round(1.5 * count / n * sample.numel()) + 8)
        likely = (sizes < sample.topk(keep).values[-1]).logical_not_().nonzero().squeeze(1)
        if likely.numel() >= count:
            return likely[sizes[likely].topk(count, sorted=False).indices]
    return sizes.topk(count, sorted=False).indices


def pack(x: Tensor, places: Tensor) -> Tensor:
    """The float32 values of x [n] at these places, then the places as int32, in bytes."""
    return torch.cat([x[places].float().view(torch.uint8), places.int().view(torch.uint8)])


def unpack(message: Tensor) -> tuple[Tensor, Tensor]:
    """The values and places of a message."""
    values, places = message.contiguous().chunk(2)
    return values.clone().view(torch.float32), places.clone().view(torch.int32).long()
