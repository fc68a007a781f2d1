"""Moves a tensor between placements, forward and backward, on plain local tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from weft._torch import functional_collectives as functional
from weft.core import Boundary, UnsupportedModel, collective

from .mesh import Mesh

Move = tuple[Placement, Placement]


def _dim(placement: Placement, x: Tensor) -> int:
    assert isinstance(placement, Shard)
    return placement.dim % x.ndim


def _divisible(length: int, size: int, dim: int) -> int:
    if length % size:
        raise UnsupportedModel(
            "layout",
            size,
            f"dim {dim} of an activation has {length} rows",
            f"use a multiple of {size}",
        )
    return length // size


def _divided(x: Tensor, dim: int, size: int, each: int) -> Tensor:
    """Dim `dim` as two, [size, each]. `unflatten` is Python, which a compiler does not follow where
    a function mode is active."""
    return x.reshape(*x.shape[:dim], size, each, *x.shape[dim + 1 :])


def split_dim(x: Tensor, dim: int, index: int, size: int) -> Tensor:
    """Slice a tensor that every rank holds whole.

    Args:
        x: the tensor.
        dim: the dim to slice.
        index: this rank's place among those that share it.
        size: how many ranks share it.
    """
    each = _divisible(x.shape[dim], size, dim)
    return x.narrow(dim, index * each, each).contiguous()


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup, total: int | None) -> Tensor:
    """Concatenate the shards of all ranks.

    Args:
        x: this rank's shard.
        dim: the dim that is sharded.
        group: the ranks that hold the shards.
        total: length of `dim` where shards differ (torch.chunk's rule); None: they are equal.
    """
    size = dist.get_world_size(group)
    each = x.shape[dim] if total is None else -(-total // size)
    if x.shape[dim] < each:
        pad = list(x.shape)
        pad[dim] = each - x.shape[dim]
        x = torch.cat([x, x.new_zeros(pad)], dim)
    out = functional.all_gather(x, group)
    parts = out.view(size, *x.shape)
    whole = parts.movedim(0, dim).flatten(dim, dim + 1) if dim else out
    return whole if total is None else whole.narrow(dim, 0, total)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Partial sums -> this rank's slice of the sum."""
    size = dist.get_world_size(group)
    each = _divisible(x.shape[dim], size, dim)
    blocks = _divided(x, dim, size, each).movedim(dim, 0)
    return functional.reduce_scatter(blocks.flatten(0, 1), group).view(blocks.shape[1:])


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Partial sums -> the sum on every rank."""
    return functional.all_reduce(x, "sum", group.group_name)


def all_to_all(x: Tensor, src: int, dst: int, group: dist.ProcessGroup) -> Tensor:
    """Shards of dim `src` -> shards of dim `dst`."""
    size = dist.get_world_size(group)
    each = _divisible(x.shape[dst], size, dst)
    sent = _divided(x, dst, size, each).movedim(dst, 0)
    received = functional.all_to_all(sent.flatten(0, 1), group).view(sent.shape)
    return received.movedim(0, src).flatten(src, src + 1)


def convert_placement(
    x: Tensor, move: Move, group: dist.ProcessGroup, total: int | None = None
) -> Tensor:
    """A tensor placed as move[0] -> placed as move[1]."""
    src, dst = move
    match collective(src, dst):
        case "all_reduce":
            return all_reduce(x, group)
        case "all_gather":
            return all_gather(x, _dim(src, x), group, total)
        case "reduce_scatter":
            return reduce_scatter(x, _dim(dst, x), group)
        case "all_to_all":
            return all_to_all(x, _dim(src, x), _dim(dst, x), group)
    if src == dst:
        return x
    size, index = dist.get_world_size(group), dist.get_rank(group)
    if total is None:
        return split_dim(x, _dim(dst, x), index, size)
    each = -(-total // size)
    start = min(index * each, total)
    return x.narrow(_dim(dst, x), start, min(each, total - start)).contiguous()


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        forward: Move,
        backward: Move,
        group: dist.ProcessGroup,
        total: int | None,
    ) -> Tensor:
        ctx.rest = backward, group, total
        moved = convert_placement(x, forward, group, total)
        return x.view_as(x) if moved is x else moved

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return convert_placement(grads[0], *ctx.rest), None, None, None, None


def cross_boundary(
    x: Tensor, boundary: Boundary, entry: bool, mesh: Mesh, total: int | None = None
) -> Tensor:
    """Move a tensor between its placements outside and inside a module.

    Args:
        x: this rank's part of the tensor.
        boundary: the placements on both sides.
        entry: True for the way in, False for the way out.
        mesh: the process groups of the layout.
        total: length of the sharded dim where shards differ.
    """
    for axis, forward, backward in boundary.moves(entry):
        group = mesh.group(axis)
        if group is not None and (forward[0] != forward[1] or backward[0] != backward[1]):
            x = _Cross.apply(x, forward, backward, group, total)
    return x
