"""Fully sharded data parallel (ZeRO-3) by hand: FSDP2's `fully_shard` on every block and on the
root."""

from __future__ import annotations

import torch.distributed as dist
from plain_single import Trainer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from work import MakeOptimizer, blocks_of, compile_blocks


def trainer(
    model: nn.Module, optimizer: MakeOptimizer, clip: float | None, compiled: bool = False
) -> Trainer:
    """`step` takes this rank's rows of the batch."""
    if compiled:
        compile_blocks(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    sharded = fully_shard(model, mesh=mesh)
    return Trainer(sharded, optimizer, clip, dist.get_world_size(), compiled)
