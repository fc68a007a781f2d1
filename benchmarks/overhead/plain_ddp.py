"""Data parallel by hand: DistributedDataParallel over all ranks."""

from __future__ import annotations

import torch.distributed as dist
from plain_single import Trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from work import MakeOptimizer


def trainer(model: nn.Module, optimizer: MakeOptimizer, clip: float | None) -> Trainer:
    """`step` takes this rank's rows of the batch."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Trainer(wrapped, optimizer, clip, ranks=dist.get_world_size())
