"""Catch-up: a replica takes over the whole state of another, rank by rank, and goes on from its
step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .transports import start_async


def send_state(group: dist.ProcessGroup, facts: dict[str, Any], tensors: Sequence[Tensor]) -> None:
    """Send facts (JSON values) and tensors to rank 1 of the group. Raises RuntimeError if it does
    not take them."""
    text = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
    for message in [torch.tensor([text.numel()]), text, *map(_bytes, tensors)]:
        if message.numel():
            start_async(dist.isend(message, group=group, group_dst=1)).wait()


def receive_facts(group: dist.ProcessGroup) -> dict[str, Any]:
    """The facts that rank 0 of the group gives; `take` follows."""
    size = torch.zeros(1, dtype=torch.int64)
    start_async(dist.irecv(size, group=group, group_src=0)).wait()
    text = torch.empty(int(size), dtype=torch.uint8)
    start_async(dist.irecv(text, group=group, group_src=0)).wait()
    return json.loads(bytes(text.tolist()))


@torch.no_grad()
def receive_tensors(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> None:
    """Fill these tensors, of the same shapes and dtypes as those that are given."""
    for tensor in tensors:
        message = _bytes(tensor)
        if message.numel():
            start_async(dist.irecv(message, group=group, group_src=0)).wait()
            tensor.copy_(message.view(tensor.dtype).view(tensor.shape))


def _bytes(tensor: Tensor) -> Tensor:
    return (
        tensor.detach()
        .cpu()
        .clone(memory_format=torch.contiguous_format)
        .reshape(-1)
        .view(torch.uint8)
    )
