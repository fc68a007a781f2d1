"""topk: the largest elements with their places (Aji & Heafield 2017; Stich et al. 2018).

Sent values are exact in float32; |x - decoded|^2 <= (1 - density) |x|^2. NaN counts as the largest
magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core import MessageCodec, require

from ._sparse_message import ELEMENT_BYTES, largest_places, pack, unpack


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
            "a fraction above 0 and at most 1",
        )

    def count(self, n: int) -> int:
        """Elements that are sent of n."""
        return min(n, max(1, round(self.density * n)))

    def nbytes(self, n: int) -> int:
        return ELEMENT_BYTES * self.count(n)

    def encode(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return pack(x, largest_places(x, self.count(x.numel())))

    def decode(self, message: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        values, places = unpack(message)
        return torch.zeros(n, dtype=dtype, device=message.device).index_copy_(
            0, places, values.to(dtype)
        )


def topk(density: float = 0.01, feedback: bool = True) -> TopK:
    return TopK(feedback, density)


CODECS = {"topk": topk}
