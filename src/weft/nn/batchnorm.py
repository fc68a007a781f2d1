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


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        if group is None:
            return x.view_as(x)
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if ctx.group is None:
            return grads[0], None
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class BatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm*d` over all ranks of a group, each of which holds the same number of
    samples; without a group, of this rank's. Statistics are float32 beside weights in bf16, for
    which torch's own has no kernel."""

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
        if not self.training:
            weight, bias = (p if p is None else p.to(x.dtype) for p in (self.weight, self.bias))
            mean, var = self.running_mean, self.running_var
            y = F.batch_norm(x, mean, var, weight, bias, mean is None, eps=self.eps)
            return y.to(input.dtype)
        dims = [d for d in range(x.ndim) if d != 1]
        shape = [-1 if d == 1 else 1 for d in range(x.ndim)]
        count = x.numel() // x.shape[1]
        if self.group is not None:
            count *= dist.get_world_size(self.group)
        mean = _Sum.apply(x.sum(dims), self.group) / count
        centred = x - mean.view(shape)
        var = _Sum.apply(centred.square().sum(dims), self.group) / count
        if self.track_running_stats:
            self._track(mean.detach(), var.detach() * (count / max(1, count - 1)))
        y = centred * torch.rsqrt(var + self.eps).view(shape)
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(input.dtype)

    def _track(self, mean: Tensor, var: Tensor) -> None:
        assert (
            self.running_mean is not None
            and self.running_var is not None
            and self.num_batches_tracked is not None
        )
        self.num_batches_tracked.add_(1)
        rate = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
        self.running_var.lerp_(var.to(self.running_var.dtype), rate)
