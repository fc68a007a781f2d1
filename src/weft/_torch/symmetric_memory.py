"""Memory that the GPUs of a process group share, over which inductor's fused matmuls send
(`torch.distributed._symmetric_memory`). Torch has no public name for it."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist


def enable(group: dist.ProcessGroup) -> None:
    """Let inductor fuse collectives of this group with matmuls. Torch has deprecated the call, yet
    its pass looks at no group without."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)


def try_to_share(group: dist.ProcessGroup, device: torch.device) -> None:
    """Make a little shared memory; all ranks of the group call it. Raises RuntimeError where their
    GPUs share none."""
    from torch.distributed import _symmetric_memory as shared

    shared.rendezvous(shared.empty(1, device=device), group)
