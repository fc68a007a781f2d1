"""Batch normalisation whose statistics are those of the whole microbatch, on any backend.

`torch.nn.SyncBatchNorm` runs on accelerators only. Here the sums are all-reduced by operators that
autograd differentiates: mean first, then the squared deviations from it, so nothing cancels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import handle_torch_function

from weft._torch.modes import function_modes


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def batch_sums(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """[n, c, ...] -> [c], the sum of each channel, and [], how many elements it has: over all ranks
    of a group, one of which may have more rows than another. The count has no gradient."""
    if function_modes():
        found: tuple[Tensor, Tensor] = handle_torch_function(batch_sums, (x,), x, group)
        return found
    sums = x.sum([d for d in range(x.ndim) if d != 1])
    together = torch.cat([sums, sums.new_full((1,), x.numel() // x.shape[1])])
    if group is not None:
        together = _Sum.apply(together, group)
    return together[:-1], together[-1].detach()


class BatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm*d` over the rows of all ranks of a group, or of this rank. Statistics are
    float32 beside weights in bf16, for which torch's own has no kernel."""

    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, module: Any, group: dist.ProcessGroup | None) -> BatchNorm:
        """The same parameters and buffers (not copies), with statistics over `group`."""
        new = cls.__new__(cls)
        new.__dict__.update(module.__dict__)
        new.group = group
        return new

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"batch norm takes at least 2 dims, got {input.ndim}")

    def forward(self, input: Tensor) -> Tensor:
        """[n, c, ...] -> the same shape. Ioffe and Szegedy 2015."""
        x = input if input.dtype == torch.float64 else input.float()
        if not self.training and self.running_mean is not None:
            weight, bias = (p if p is None else p.to(x.dtype) for p in (self.weight, self.bias))
            mean, var = self.running_mean, self.running_var
            y = F.batch_norm(x, mean, var, weight, bias, False, eps=self.eps)
            return y.to(input.dtype)
        shape = [-1 if d == 1 else 1 for d in range(x.ndim)]
        sums, count = batch_sums(x, self.group)
        rows = count.clamp(min=1)
        mean = sums / rows
        centred = x - mean.view(shape)
        squares, _ = batch_sums(centred.square(), self.group)
        var = squares / rows
        if self.training and self.track_running_stats:
            self._track(mean.detach(), squares.detach() / (rows - 1).clamp(min=1), count)
        y = centred * torch.rsqrt(var + self.eps).view(shape)
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(input.dtype)

    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Of no elements nothing is tracked, as in torch."""
        batches = self.num_batches_tracked
        if batches is not None:
            batches.add_(1)
        if self.running_mean is None or self.running_var is None:
            return
        rate = self.momentum
        if rate is None:  # the mean of all batches
            rate = 0.0 if batches is None else 1.0 / float(batches)
        for kept, new in ((self.running_mean, mean), (self.running_var, var)):
            kept.lerp_(new.to(kept.dtype), (count > 0).to(kept.dtype) * rate)
