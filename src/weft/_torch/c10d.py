"""torch.distributed: the default process group's store, and what the flight recorder has seen."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def default_store() -> dist.Store:
    """The store in which the ranks of the default process group met. Torch hands it to nobody; a
    second store would need a second port."""
    return dist.distributed_c10d._get_default_store()


def flight_record() -> dict[str, Any]:
    """Collectives that this process has begun, with their state: what
    `TORCH_FR_BUFFER_SIZE` keeps. Torch writes it to files; only this gives it to the process."""
    return json.loads(torch._C._distributed_c10d._dump_fr_trace_json(includeCollectives=True))  # type: ignore[attr-defined]


def group_names() -> dict[str, dist.ProcessGroup]:
    """Name in the flight record -> process group."""
    return {name: group for group, name in dist.distributed_c10d._world.pg_names.items()}


def exchange_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """A device whose tensors this group exchanges: the CPU where it can."""
    devices = (group or dist.group.WORLD)._device_types  # type: ignore[union-attr]
    if torch.device("cpu") in devices:
        return torch.device("cpu")
    return torch.device(devices[0].type, torch.cuda.current_device())
