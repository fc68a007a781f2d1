"""Moves a tensor between placements, forward and backward, on plain local tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from weft._torch import functional_collectives as functional
from weft.core import Boundary, UnsupportedModel, collective

from .mesh import Mesh

Convert = Callable[[Tensor], Tensor]
Ways = tuple[Convert | None, Convert | None]  # there in forward, back in backward; None: it stays


def _divisible(length: int, size: int, dim: int) -> int:
    if length % size:
        raise UnsupportedModel(
            "layout",
            f"{size} ranks",
            f"they do not divide the {length} rows of dim {dim} of an activation",
            f"use a length that {size} divides, or a layout that does not cut the sequence",
        )
    return length // size


def _divided(x: Tensor, dim: int, size: int, each: int) -> Tensor:
    """Dim `dim` as two, [size, each]. `unflatten` is Python, which a compiler does not follow where
    a function mode is active."""
    return x.reshape(*x.shape[:dim], size, each, *x.shape[dim + 1 :])


def split_dim(x: Tensor, dim: int, index: int, size: int, total: int | None = None) -> Tensor:
    """Slice a tensor that every rank holds whole.

    Args:
        x: the tensor.
        dim: the dim to slice; from the end if negative.
        index: this rank's place among those that share it.
        size: how many ranks share it.
        total: length of `dim` where slices differ (torch.chunk's rule); None: they are equal.
    """
    if total is None:
        each = _divisible(x.shape[dim], size, dim)
        return x.narrow(dim, index * each, each).contiguous()
    each = -(-total // size)
    start = min(index * each, total)
    return x.narrow(dim, start, min(each, total - start)).contiguous()


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup, total: int | None) -> Tensor:
    """Concatenate the shards of all ranks.

    Args:
        x: this rank's shard.
        dim: the dim that is sharded; from the end if negative.
        group: the ranks that hold the shards.
        total: length of `dim` where shards differ (torch.chunk's rule); None: they are equal.
    """
    dim, size = dim % x.ndim, group.size()
    each = x.shape[dim] if total is None else -(-total // size)
    if x.shape[dim] < each:
        pad = list(x.shape)
        pad[dim] = each - x.shape[dim]
        x = torch.cat([x, x.new_zeros(pad)], dim)
    out = functional.all_gather(x, group)
    whole = torch.cat(out.chunk(size), dim) if dim else out
    if total is None or whole.shape[dim] == total:
        return whole  # no view: what takes it may change it in place
    return whole.narrow(dim, 0, total)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Partial sums -> this rank's slice of the sum."""
    dim, size = dim % x.ndim, group.size()
    _divisible(x.shape[dim], size, dim)
    blocks = torch.cat(x.chunk(size, dim)) if dim else x
    return functional.reduce_scatter(blocks, group)


def all_to_all(x: Tensor, src: int, dst: int, group: dist.ProcessGroup) -> Tensor:
    """Shards of dim `src` -> shards of dim `dst`."""
    src, dst, size = src % x.ndim, dst % x.ndim, group.size()
    each = _divisible(x.shape[dst], size, dst)
    sent = _divided(x, dst, size, each).movedim(dst, 0)
    received = functional.all_to_all(sent.flatten(0, 1), group).view(sent.shape)
    return received.movedim(0, src).flatten(src, src + 1)


def _conversion(
    src: Placement, dst: Placement, group: dist.ProcessGroup, total: int | None
) -> Convert | None:
    """What turns a tensor placed as `src` into one placed as `dst`. None: they are the same."""
    if src == dst:
        return None
    kind = collective(src, dst)
    if kind == "all_reduce":
        return partial(functional.all_reduce, op="sum", group=group)
    if kind == "all_gather":
        return partial(all_gather, dim=_dim(src), group=group, total=total)
    if kind == "reduce_scatter":
        return partial(reduce_scatter, dim=_dim(dst), group=group)
    if kind == "all_to_all":
        return partial(all_to_all, src=_dim(src), dst=_dim(dst), group=group)
    return partial(split_dim, dim=_dim(dst), index=group.rank(), size=group.size(), total=total)


def _dim(placement: Placement) -> int:
    assert isinstance(placement, Shard)
    return placement.dim


class _Cross(torch.autograd.Function):
    """Each way's derivative is the other way, so gradients may be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ways: Ways) -> Tensor:
        there, back = ways
        ctx.ways = back, there
        return x.view_as(x) if there is None else there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Cross.apply(grads[0], ctx.ways), None


class Crossing:
    """Moves a tensor between its placements outside and inside a module. The collectives are chosen
    when it is made, not each time it is called.

    Args:
        boundary: the placements on both sides.
        entry: True for the way in, False for the way out.
        mesh: the process groups of the layout.
        total: length of the sharded dim where shards differ.
    """

    def __init__(self, boundary: Boundary, entry: bool, mesh: Mesh, total: int | None = None):
        self._ways: list[Ways] = []
        for axis, forward, backward in boundary.moves(entry):
            group = mesh.group(axis)
            if group is not None:
                there, back = (_conversion(*move, group, total) for move in (forward, backward))
                if there or back:
                    self._ways.append((there, back))

    def __call__(self, x: Tensor) -> Tensor:
        """This rank's part of a tensor -> its part on the other side."""
        for ways in self._ways:
            x = _Cross.apply(x, ways)
        return x
