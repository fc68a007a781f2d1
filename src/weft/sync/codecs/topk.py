"""topk: the largest elements with their places (Aji & Heafield 2017; Stich et al. 2018).

What is sent is exact in float32; |x - decoded|^2 <= (1 - density) |x|^2. Something that is not a
number counts as the largest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core import MessageCodec, require

ELEMENT_BYTES = 8  # a float32 and an int32
SAMPLE = 2**14  # elements that the first guess of the threshold is made from


@dataclass(frozen=True)
class TopK(MessageCodec):
    density: float = 0.01
    name = "topk"
    sparse = True

    def __post_init__(self) -> None:
        require("sync.codec.feedback", self.feedback, bool, lambda _: True, "true or false")
        require(
            "sync.codec.density",
            self.density,
            float,
            lambda x: 0 < x <= 1,
            "a part, above 0 and at most 1",
        )

    def count(self, n: int) -> int:
        """Elements that are sent of n."""
        return min(n, max(1, round(self.density * n)))

    def nbytes(self, n: int) -> int:
        return ELEMENT_BYTES * self.count(n)

    def encode(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return pack(x, largest(x, self.count(x.numel())))

    def decode(self, message: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        values, places = unpack(message)
        return torch.zeros(n, dtype=dtype, device=message.device).index_copy_(
            0, places, values.to(dtype)
        )


def largest(x: Tensor, count: int) -> Tensor:
    """The places of the `count` largest magnitudes of x [n]: sorted out among those above a
    threshold, which a sample of x suggests (Lin et al. 2018)."""
    sizes, n = x.abs(), x.numel()
    if n > 8 * SAMPLE and count < n // 8:
        sample = sizes[:: n // SAMPLE]
        keep = min(sample.numel(), round(1.5 * count / n * sample.numel()) + 8)
        likely = (sizes < sample.topk(keep).values[-1]).logical_not_().nonzero().squeeze(1)
        if likely.numel() >= count:
            return likely[sizes[likely].topk(count, sorted=False).indices]
    return sizes.topk(count, sorted=False).indices


def pack(x: Tensor, places: Tensor) -> Tensor:
    """uint8: the float32 values of x [n] at these places, and the places as int32."""
    return torch.cat([x[places].float().view(torch.uint8), places.int().view(torch.uint8)])


def unpack(message: Tensor) -> tuple[Tensor, Tensor]:
    """Values and places."""
    values, places = message.contiguous().chunk(2)
    return values.clone().view(torch.float32), places.clone().view(torch.int32).long()


def topk(density: float = 0.01, feedback: bool = True) -> TopK:
    return TopK(feedback, density)


CODECS = {"topk": topk}
