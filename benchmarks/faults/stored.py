"""What a run folder holds in its latest checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from weft import checkpoint
from weft.core.shards import whole_shard


def tensors(out: Path) -> dict[str, Tensor]:
    contents = checkpoint.read_index(out / "checkpoints")
    found = {name: torch.empty(s.shape, dtype=s.dtype) for name, s in contents.tensors.items()}
    checkpoint.load_checkpoint(
        out / "checkpoints", None, [whole_shard(name, tensor) for name, tensor in found.items()]
    )
    return found
