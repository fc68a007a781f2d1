"""Values of all ranks, exchanged as JSON: torch pickles objects, and a pickle can run code."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from weft._torch.c10d import exchange_device


def gather_json(
    value: Any, group: dist.ProcessGroup | None = None, only_first: bool = False
) -> list[Any]:
    """The values of all ranks, in rank order; they arrive as JSON has them, tuples as lists.

    Args:
        value: of this rank.
        group: of these ranks; default: the default group, or this process alone without one.
        only_first: only the first rank gets them, others an empty list.
    """
    world = dist.get_world_size(group) if dist.is_initialized() else 1
    text = json.dumps(value).encode()
    if world == 1:
        return [json.loads(text)]
    device = exchange_device(group)
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(text)], device=device), group)
    widest = int(torch.cat(sizes).max())
    padded = torch.cat([own, own.new_zeros(widest - len(text))])
    first = dist.get_rank(group) == 0
    rows = [torch.empty_like(padded) for _ in range(world if first or not only_first else 0)]
    if only_first:
        dist.gather(padded, rows or None, group=group, group_dst=0)
    else:
        dist.all_gather(rows, padded, group)
    return [
        json.loads(row[: int(size)].cpu().numpy().tobytes())
        for row, size in zip(rows, sizes, strict=False)
    ]
