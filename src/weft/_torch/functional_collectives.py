"""Collectives that return a new tensor, which a compiler sees as operators.

`torch.distributed`'s own write into a given tensor, and dynamo replaces only some of them by these.
`torch.distributed._functional_collectives` wraps them too, in a tensor subclass that waits later;
here each waits at once, as `torch.distributed` does. Torch has no public name for them. No gradient
flows through them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

_ops = torch.ops._c10d_functional


def all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    """`x` reduced by "sum" or "max" over all ranks of the process group of this name."""
    return _ops.wait_tensor(_ops.all_reduce(x.detach().contiguous(), op, group))


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, ...] of each rank -> [ranks * n, ...]."""
    gathered = _ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)
    return _ops.wait_tensor(gathered)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks * n, ...] on each rank -> this rank's [n, ...] of the sum."""
    name = group.group_name
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size(), name))


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks * n, ...]: n rows to each rank -> n rows from each rank."""
    each = [x.shape[0] // group.size()] * group.size()
    return _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), each, each, group.group_name))
