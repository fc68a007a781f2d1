"""int8, int4: whole numbers and one scale for each block of elements (Dettmers 2016; Alistarh et
al. 2017, QSGD).

Rounded to the nearest, an element is off by at most half a step, its block's largest magnitude /
254 (int8) or / 14 (int4); stochastic rounding errs by at most a step and is unbiased. Zeros
stay zeros. A block with NaN, Inf or a value beyond float32's range decodes to values that are not
finite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core import MessageCodec, require

from ._scales import SCALE_BYTES, read_scales


@dataclass(frozen=True)
class BlockQuantize(MessageCodec):
    name: str = "int8"  # type: ignore[misc]
    bits: int = 8
    size: int = 128
    stochastic: bool = False

    def __post_init__(self) -> None:
        require("sync.codec.feedback", self.feedback, bool, lambda _: True, "true or false")
        require("sync.codec.stochastic", self.stochastic, bool, lambda _: True, "true or false")
        require(
            "sync.codec.block",
            self.size,
            int,
            lambda x: x > 0 and x % 2 == 0,
            "an even number of elements",
        )

    @property
    def block(self) -> int:  # type: ignore[override]
        return self.size

    @property
    def draws(self) -> bool:
        return self.stochastic

    def nbytes(self, n: int) -> int:
        blocks = -(-n // self.size)
        return blocks * (self.size * self.bits // 8 + SCALE_BYTES)

    def encode(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        top = 2 ** (self.bits - 1) - 1
        blocks = F.pad(x, (0, -x.shape[-1] % self.size)).unflatten(-1, (-1, self.size)).float()
        # several times as quick as the norm, or abs().amax(), on CPUs
        largest = torch.maximum(blocks.amax(-1, keepdim=True), blocks.amin(-1, keepdim=True).neg_())
        scale = largest / top
        # by division: one over a tiny scale would overflow
        steps = blocks / scale.masked_fill(scale == 0, 1.0)
        if self.stochastic:
            noise = torch.rand(
                steps.shape, generator=generator, dtype=steps.dtype, device=steps.device
            )
            steps = steps.add_(noise).floor_()
        else:
            steps = steps.round_()
        steps = steps.clamp_(-top, top)
        if self.bits == 8:
            whole = steps.to(torch.int8).view(torch.uint8)
        else:
            nibbles = steps.add_(8).to(torch.int8).view(torch.uint8)  # quicker than to(torch.uint8)
            whole = nibbles[..., : self.size // 2] | (nibbles[..., self.size // 2 :] << 4)
        return torch.cat([whole.flatten(-2), scale.squeeze(-1).view(torch.uint8)], -1)

    def decode(self, message: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        blocks = -(-n // self.size)
        whole, scale = message.split(
            [blocks * self.size * self.bits // 8, blocks * SCALE_BYTES], -1
        )
        steps = (
            whole.unflatten(-1, (blocks, -1))
            if blocks
            else whole.unflatten(-1, (0, self.size * self.bits // 8))
        )
        if self.bits == 8:
            values = steps.view(torch.int8).to(dtype)
        else:
            values = torch.cat([steps & 15, steps >> 4], -1).to(dtype).sub_(8)
        return values.mul_(read_scales(scale).unsqueeze(-1)).flatten(-2)[..., :n]


def _with_name(name: str, bits: int, feedback: bool) -> Callable[..., BlockQuantize]:
    def make(
        block: int = 128, stochastic: bool = False, feedback: bool = feedback
    ) -> BlockQuantize:
        return BlockQuantize(feedback, name, bits, block, stochastic)

    return make


CODECS = {"int8": _with_name("int8", 8, True), "int4": _with_name("int4", 4, True)}
