"""Collectives that return a new tensor, in eager steps and in compiled graphs.

A compiler needs operators that write into nothing. Dynamo replaces only some calls of
`torch.distributed` by such operators, and `torch.distributed._functional_collectives` wraps them in
a tensor subclass that waits later; here each waits at once. Torch has no public name for them.
In an eager step `torch.distributed` does the same with half as many Python calls. No gradient flows
through either.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

_ops = torch.ops._c10d_functional
_wait = _ops.wait_tensor.default
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def all_reduce(x: Tensor, op: str, group: dist.ProcessGroup) -> Tensor:
    """`x` reduced by "sum" or "max" over all ranks of the group."""
    if torch.compiler.is_compiling():
        return _wait(_ops.all_reduce.default(x.detach().contiguous(), op, group.group_name))
    reduced = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(reduced, _REDUCE_OPS[op], group)
    return reduced


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, ...] of each rank -> [ranks * n, ...]."""
    x, size = x.detach().contiguous(), group.size()
    if torch.compiler.is_compiling():
        return _wait(_ops.all_gather_into_tensor.default(x, size, group.group_name))
    gathered = x.new_empty((size * x.shape[0], *x.shape[1:]))
    dist.all_gather_single(gathered, x, group)
    return gathered


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks * n, ...] on each rank -> this rank's [n, ...] of the sum."""
    x, size = x.detach().contiguous(), group.size()
    if torch.compiler.is_compiling():
        return _wait(_ops.reduce_scatter_tensor.default(x, "sum", size, group.group_name))
    reduced = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    dist.reduce_scatter_single(reduced, x, dist.ReduceOp.SUM, group)
    return reduced


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks * n, ...]: n rows to each rank -> n rows from each rank."""
    x, size = x.detach().contiguous(), group.size()
    if torch.compiler.is_compiling():
        each = [x.shape[0] // size] * size
        return _wait(_ops.all_to_all_single.default(x, each, each, group.group_name))
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received
