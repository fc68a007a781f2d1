"""How fast the processes of this host all-reduce tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.filesize import decimal

from weft.core import time_once
from weft.parallel import wire_bytes

from ..choose_backend import Backend
from ..local_workers import Pool
from .findings import Finding

BYTES = {"gloo": 8 << 20, "nccl": 256 << 20}
ROUNDS = 5
LIMIT_S = 60.0


@dataclass(frozen=True)
class AllReduceTiming:
    """An all-reduce of `size` bytes over `ranks`: seconds of the best round, and whether the sum
    was right."""

    ranks: int
    size: int
    seconds: float
    right: bool

    @property
    def bytes_per_s(self) -> float:
        """What goes over each rank's link."""
        return wire_bytes("all_reduce", self.size, self.ranks) / self.seconds


def gloo() -> Finding:
    """Two processes on this host sum a tensor over gloo."""
    return _over("gloo", 2)


def nccl() -> Finding | None:
    """A process on each GPU of this host; None where there are fewer than two."""
    count = torch.cuda.device_count()
    return _over("nccl", count) if count > 1 else None


def _over(backend: Backend, ranks: int) -> Finding:
    with Pool(ranks, backend=backend) as pool:
        device = "cuda" if backend == "nccl" else "cpu"
        return allreduce_finding(
            backend, pool.run(time_allreduce, BYTES[backend], device, timeout=LIMIT_S)[0]
        )


def time_allreduce(size: int, device: str) -> AllReduceTiming:
    """What a rank of a process group sees, with tensors on this kind of device."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensor, best = torch.empty(size // 4, device=device), float("inf")
    for _ in range(ROUNDS):
        tensor.fill_(rank + 1)
        best = min(best, time_once(lambda: dist.all_reduce(tensor), tensor.device))
    return AllReduceTiming(ranks, size, best, bool((tensor == ranks * (ranks + 1) / 2).all()))


def allreduce_finding(name: str, seen: AllReduceTiming) -> Finding:
    """What follows from one sum."""
    found = (
        f"{seen.ranks} processes sum {decimal(seen.size)} in {seen.seconds:.2g} s,"
        f" {rate_text(seen.bytes_per_s)}"
    )
    facts = {
        "ranks": seen.ranks,
        "bytes": seen.size,
        "seconds": seen.seconds,
        "bytes_per_s": seen.bytes_per_s,
    }
    if not seen.right:
        return Finding(
            name,
            "wrong",
            f"{found}; the sum is wrong",
            "do not trust a run on this host: see dmesg",
            facts,
        )
    return Finding(name, "ok", found, "", facts)


def rate_text(bytes_per_s: float) -> str:
    """In words: 1.2 GB/s."""
    return f"{decimal(int(bytes_per_s))}/s"
