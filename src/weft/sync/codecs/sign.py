"""sign: one bit for each element, and one scale for each block, the mean magnitude (Seide et al.
2014; Karimireddy et al. 2019, EF-SignSGD).

For a block x of n elements, |x - decoded|^2 = |x|^2 - |x|_1^2 / n. A block with NaN or Inf decodes
to values that are not finite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core import MessageCodec, require

from ._scales import SCALE_BYTES, read_scales


@dataclass(frozen=True)
class Sign(MessageCodec):
    size: int = 1024
    name = "sign"

    def __post_init__(self) -> None:
        require("sync.codec.feedback", self.feedback, bool, lambda _: True, "true or false")
        require(
            "sync.codec.block",
            self.size,
            int,
            lambda x: x > 0 and x % 8 == 0,
            "a multiple of 8 elements",
        )

    @property
    def block(self) -> int:  # type: ignore[override]
        return self.size

    def nbytes(self, n: int) -> int:
        return -(-n // self.size) * (self.size // 8 + SCALE_BYTES)

    def encode(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        short = -x.shape[-1] % self.size
        blocks = F.pad(x, (0, short)).unflatten(-1, (-1, self.size)).float()
        counts = torch.full(blocks.shape[-2:-1], self.size, dtype=torch.float32, device=x.device)
        if short:
            counts[-1] -= short  # the mean of what is there
        scale = torch.linalg.vector_norm(blocks, 1, dim=-1) / counts
        bits = (blocks < 0).unflatten(-1, (8, -1)).to(torch.uint8)
        whole = bits[..., 0, :].clone()
        for place in range(1, 8):
            whole |= bits[..., place, :] << place
        return torch.cat([whole.flatten(-2), scale.view(torch.uint8)], -1)

    def decode(self, message: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        blocks = -(-n // self.size)
        whole, scale = message.split([blocks * self.size // 8, blocks * SCALE_BYTES], -1)
        whole = whole.unflatten(-1, (blocks, self.size // 8))
        bits = torch.stack([(whole >> place) & 1 for place in range(8)], -2).flatten(-2)
        signs = bits.to(dtype).mul_(-2).add_(1)
        return signs.mul_(read_scales(scale).unsqueeze(-1)).flatten(-2)[..., :n]


def sign(block: int = 1024, feedback: bool = True) -> Sign:
    return Sign(feedback, block)


CODECS = {"sign": sign}
