"""What is compared: torch's DistributedDataParallel with its hooks, and weft's synchronisers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook as post_local,
    powerSGD_hook as power_sgd,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

WARMUP = 10  # steps after which torch's PowerSGD and post-local SGD begin
PERIOD = 10  # of post-local SGD
# PowerSGD's hook dies on gloo with more: its collectives then begin in another order on each rank
ONE_BUCKET = 64


@dataclass(frozen=True)
class Side:
    """`weft`: (synchroniser, codec, options). `prepare`: a DDP module -> what is called after each
    optimizer step. `local`: that lets replicas step apart. `bucket_mb`: of DDP, if not its own
    choice. `other`: it is in others.py, for another Python. `same`: the side that computes the
    same, whose losses stand for this one's too."""

    weft: tuple[str, Any, dict[str, Any]] | None = None
    prepare: Callable[[nn.parallel.DistributedDataParallel], Callable[[], None]] | None = None
    local: bool = False
    bucket_mb: int | None = None
    other: bool = False
    same: str | None = None

    @property
    def apart(self) -> bool:
        """Whether replicas have weights of their own."""
        return self.local or (self.weft is not None and "period" in self.weft[2])


def _fp16(module: nn.parallel.DistributedDataParallel) -> Callable[[], None]:
    module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return lambda: None


def _power(rank: int) -> Callable[[nn.parallel.DistributedDataParallel], Callable[[], None]]:
    def prepare(module: nn.parallel.DistributedDataParallel) -> Callable[[], None]:
        state = power_sgd.PowerSGDState(None, rank, start_powerSGD_iter=WARMUP)
        module.register_comm_hook(state, power_sgd.powerSGD_hook)
        return lambda: None

    return prepare


def _local(period: int) -> Callable[[nn.parallel.DistributedDataParallel], Callable[[], None]]:
    def prepare(module: nn.parallel.DistributedDataParallel) -> Callable[[], None]:
        alone, _ = dist.new_subgroups(
            1
        )  # each host is one process; on CPUs torch asks for the size
        state = post_local.PostLocalSGDState(None, alone, start_localSGD_iter=WARMUP)
        module.register_comm_hook(state, post_local.post_localSGD_hook)
        averager = PeriodicModelAverager(period, warmup_steps=WARMUP)
        return lambda: averager.average_parameters(module.parameters())

    return prepare


def _apart(
    name: str, codec: Any, period: int, fragments: int, delay: int, **options: float
) -> Side:
    return Side(
        (name, codec, {"period": period, "fragments": fragments, "delay": delay, **options})
    )


SIDES = {
    "torch ddp": Side(),
    "torch fp16": Side(prepare=_fp16, same="torch ddp"),
    "torch powersgd 32": Side(prepare=_power(32), bucket_mb=ONE_BUCKET),
    "torch powersgd 16": Side(prepare=_power(16), bucket_mb=ONE_BUCKET),
    "torch post-local 10": Side(prepare=_local(PERIOD), local=True),
    "torchft ddp": Side(other=True, same="torch ddp"),
    "weft allreduce": Side(("allreduce", "identity", {}), same="torch ddp"),
    "weft int8": Side(("allreduce", "int8", {"bucket_mb": 4})),
    "weft int4": Side(("allreduce", "int4", {"bucket_mb": 4})),
    "weft powersgd 16": Side(("allreduce", {"name": "powersgd", "rank": 16}, {"bucket_mb": 4})),
    "weft local 10 int4": _apart("local_sgd", "int4", 10, 5, 4),
    "weft local 4 int4": _apart("local_sgd", "int4", 4, 4, 2),
    "weft local 8 int8": _apart("local_sgd", "int8", 8, 4, 2),
    "weft diloco 10 int4": _apart("diloco", "int4", 10, 5, 4, lr=0.9, momentum=0.5),
    "weft diloco 5 int4": _apart("diloco", "int4", 5, 5, 2, lr=1.4, momentum=0.0),
}
