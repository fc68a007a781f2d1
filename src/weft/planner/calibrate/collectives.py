"""Measures collectives over the backend that a run would use, and how much they slow compute that
runs meanwhile.

Each function runs on every rank of a process group, and gives the same on all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from weft.parallel import wire_bytes

from .rank_timer import RankTimer

SIZES = tuple(1 << power for power in range(12, 27, 2))  # bytes of the whole tensor
LONGEST_S = 0.03
BESIDE_BYTES = 1 << 22  # of a sum that goes on beside compute
WIDTH = 512


@dataclass(frozen=True)
class CollectiveTiming:
    """A collective of a tensor of so many bytes in all: what one rank sends of it, in so many
    messages one after the other, and seconds."""

    kind: str
    nbytes: int
    sent_bytes: float
    hops: int
    seconds: float


@dataclass(frozen=True)
class OverlapSample:
    """Seconds of compute alone, of a sum alone, and of both at once."""

    compute_s: float
    sum_s: float
    both_s: float


def time_collective(kind: str) -> list[CollectiveTiming]:
    """From small tensors to such as take long."""
    bench, found = RankTimer.here(), []
    size = dist.get_world_size()
    for nbytes in SIZES:
        elements = nbytes // 4 // size * size
        work = KINDS[kind](torch.zeros(elements, device=bench.device), size)
        seconds = bench(work, waits=True) / (2 if kind == "send" else 1)
        hops = {"all_reduce": 2 * (size - 1), "send": 1}.get(kind, size - 1)
        found.append(
            CollectiveTiming(
                kind, 4 * elements, wire_bytes(kind, 4 * elements, size), hops, seconds
            )
        )
        if seconds > LONGEST_S:
            break
    return found


def time_overlap() -> OverlapSample:
    """A sum that is begun, products of matrices that take as long, and the wait for the sum."""
    bench = RankTimer.here()
    tensor = torch.zeros(BESIDE_BYTES // 4, device=bench.device)
    a = torch.zeros(WIDTH, WIDTH, device=bench.device)
    sum_s = bench(lambda: dist.all_reduce(tensor), waits=True)
    products = max(1, round(sum_s / bench(lambda: a @ a)))

    def compute() -> None:
        for _ in range(products):
            a @ a

    def both() -> None:
        work = dist.all_reduce(tensor, async_op=True)
        compute()
        work.wait()

    return OverlapSample(bench(compute, waits=True), sum_s, bench(both, waits=True))


def _all_reduce(tensor: Tensor, size: int) -> Callable[[], object]:
    return lambda: dist.all_reduce(tensor)


def _all_gather(tensor: Tensor, size: int) -> Callable[[], object]:
    part = torch.zeros_like(tensor[: len(tensor) // size])
    return lambda: dist.all_gather_single(tensor, part)


def _reduce_scatter(tensor: Tensor, size: int) -> Callable[[], object]:
    part = torch.zeros_like(tensor[: len(tensor) // size])
    return lambda: dist.reduce_scatter_single(part, tensor)


def _all_to_all(tensor: Tensor, size: int) -> Callable[[], object]:
    out = torch.zeros_like(tensor)
    return lambda: dist.all_to_all_single(out, tensor)


def _send(tensor: Tensor, size: int) -> Callable[[], object]:
    """There and back again between neighbours, for a message has arrived when its answer has; each
    way counts."""
    rank = dist.get_rank()
    other = rank ^ 1
    if other >= size:
        return lambda: None

    def both() -> None:
        dist.send(tensor, other) if rank % 2 == 0 else dist.recv(tensor, other)
        dist.recv(tensor, other) if rank % 2 == 0 else dist.send(tensor, other)

    return both


KINDS = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send": _send,
}
