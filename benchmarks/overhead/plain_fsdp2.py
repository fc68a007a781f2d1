"""Fully sharded data parallel (ZeRO-3) by hand: FSDP2's `fully_shard` on every block and on the
root."""

from __future__ import annotations

import torch.distributed as dist
from plain_single import Trainer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from work import MakeOptimizer


def trainer(model: nn.Module, optimizer: MakeOptimizer, clip: float | None) -> Trainer:
    """`step` takes this rank's rows of the batch."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return Trainer(fully_shard(model, mesh=mesh), optimizer, clip, ranks=dist.get_world_size())
