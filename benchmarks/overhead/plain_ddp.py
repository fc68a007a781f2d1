"""Data parallel by hand: DistributedDataParallel over all ranks."""

from __future__ import annotations

import torch.distributed as dist
from plain_single import Trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from work import MakeOptimizer, compile_blocks


def trainer(
    model: nn.Module, optimizer: MakeOptimizer, clip: float | None, compiled: bool = False
) -> Trainer:
    """`step` takes this rank's rows of the batch."""
    if compiled:
        compile_blocks(model)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Trainer(wrapped, optimizer, clip, dist.get_world_size(), compiled)
