"""A frozen linear whose weight is held in 4 bits, as NF4 (QLoRA, Dettmers et al. 2023, appendix E).

The weight and its scales are plain parameters, so a layout divides, gathers and saves them as any
others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 64  # input features that share a scale
# Quantiles of a normal distribution, in -1 to 1.
VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


class Nf4Linear(nn.Module):
    """y = x W^T + b. uint8 `weight` [out, in / 2] holds two indices of VALUES a byte, the first in
    the high bits, and `scale` [out, ceil(in / BLOCK)] what these are multiplied by."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: nn.Parameter | None):
        super().__init__()
        self.out_features, self.in_features = weight.shape[0], 2 * weight.shape[1]
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Nf4Product.apply(x, self.weight, self.scale)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class _Nf4Product(torch.autograd.Function):
    """It keeps the weight in 4 bits for backward; a product of torch would keep it in x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return x @ from_nf4(weight, scale, x.dtype).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        weight, scale = ctx.saved_tensors
        (grad,) = grads
        return grad @ from_nf4(weight, scale, grad.dtype), None, None


def to_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The uint8 weight and the float32 scales of a weight [out, in] of an even number of input
    features: the nearest of VALUES times the largest magnitude of the block."""
    out, features = weight.shape
    blocks = -(-features // BLOCK)
    padded = nn.functional.pad(weight.float(), (0, blocks * BLOCK - features))
    padded = padded.view(out, blocks, BLOCK)
    scale = padded.abs().amax(2)
    at = padded / scale.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    values = torch.tensor(VALUES, device=weight.device)
    index = torch.bucketize(at, (values[1:] + values[:-1]) / 2).to(torch.uint8)
    index = index.view(out, blocks * BLOCK)[:, :features]
    return index[:, ::2] << 4 | index[:, 1::2], scale


def from_nf4(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] in `dtype`, of what `to_nf4` gave."""
    wide = torch.promote_types(dtype, torch.float32)
    values = torch.tensor(VALUES, dtype=wide, device=weight.device)
    found = values[torch.stack((weight >> 4, weight & 15), 2).flatten(1).int()]
    scales = scale.to(wide).repeat_interleave(BLOCK, 1)[:, : found.shape[1]]
    return (found * scales).to(dtype)
