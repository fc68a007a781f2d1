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


def batch_mean(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[n, c, ...] -> [c], over all ranks of a group, each of which has as many elements."""
    if function_modes():
        found: Tensor = handle_torch_function(batch_mean, (x,), x, group)
        return found
    mean = x.mean([d for d in range(x.ndim) if d != 1])
    return mean if group is None else _Sum.apply(mean, group) / dist.get_world_size(group)


def batch_count(x: Tensor, group: dist.ProcessGroup | None) -> int:
    """How many elements all ranks of a group have of each channel."""
    if function_modes():
        found: int = handle_torch_function(batch_count, (x,), x, group)
        return found
    ranks = 1 if group is None else dist.get_world_size(group)
    return x.numel() // x.shape[1] * ranks


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
        shape = [-1 if d == 1 else 1 for d in range(x.ndim)]
        mean = batch_mean(x, self.group)
        centred = x - mean.view(shape)
        var = batch_mean(centred.square(), self.group)
        if self.track_running_stats:
            count = batch_count(x, self.group)
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
