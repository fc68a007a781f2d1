"""How fast the network between hosts is, over the backends that a run uses."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from statistics import median

import torch
import torch.distributed as dist

from weft.core import time_once

from ..host_filter import admit_hosts
from ..rendezvous import interface_of
from . import allreduce_check
from .allreduce_check import rate_text
from .findings import Finding
from .host_rendezvous import HostGroup

GROUP_S = 30.0  # for the hosts to connect, and for any one message
SIZES = (1 << 18, 1 << 22, 1 << 25)  # bytes: the next one if the one before took less than
ENOUGH_S = 0.1
TRIPS = 5
ALL_PAIRS = 8  # of so many hosts; of more, each and the next
SLOW = 1e9 / 8  # bytes per second, below which gradients are better made small
UNEQUAL = 4  # the median link against the slowest


@dataclass(frozen=True)
class Link:
    """From host to host: seconds there and back, and bytes per second there."""

    source: str
    destination: str
    trip_s: float
    bytes_per_s: float

    def __str__(self) -> str:
        return f"{self.source} - {self.destination}"


def links(circle: HostGroup) -> Finding:
    """Messages between pairs of hosts, one pair after the other, over gloo."""
    with _group(circle, "gloo"):
        own = [
            [*pair, *_time_messages(*pair)]
            for pair in pairs(len(circle.members))
            if dist.get_rank() in pair
        ]
        total = allreduce_check.time_allreduce(SIZES[0], "cpu")
    numbers = list(circle.members)
    told = circle.share("links", own)
    names = [circle.name(number) for number in numbers]
    seen = [
        Link(names[a], names[b], trip, way)
        for number, rows in told.items()
        for a, b, trip, way in rows
        if numbers[a] == number
    ]
    return links_finding(seen, total.right)


def gpu_links(circle: HostGroup) -> Finding:
    """A sum over NCCL, of one GPU per host."""
    torch.cuda.set_device(0)
    with _group(circle, "nccl"):
        return allreduce_check.allreduce_finding(
            "gpu links", allreduce_check.time_allreduce(SIZES[-1], "cuda")
        )


def pairs(count: int) -> list[tuple[int, int]]:
    """Those between which a link is measured."""
    if count <= ALL_PAIRS:
        return list(combinations(range(count), 2))
    return [(rank, (rank + 1) % count) for rank in range(count)]


@contextmanager
def _group(circle: HostGroup, backend: str) -> Iterator[None]:
    """A process group of one rank per host."""
    device = interface_of(circle.members[circle.number][1])
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if device is not None:
            os.environ.setdefault(name, device)
    store, count = dist.PrefixStore(backend, circle.store()), len(circle.members)
    rank = list(circle.members).index(circle.number)
    admit_hosts(store, rank, count)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=GROUP_S),
    )
    yield
    dist.barrier()  # not after an error: the process ends, and takes its group with it
    dist.destroy_process_group()


def _time_messages(first: int, second: int) -> tuple[float, float]:
    """Seconds there and back, and bytes per second there, as the first of two ranks sees them."""
    leads, other = dist.get_rank() == first, second if dist.get_rank() == first else first
    word = torch.zeros(1, dtype=torch.int64)

    def there(message: torch.Tensor) -> float:
        def both() -> None:
            dist.send(message, other) if leads else dist.recv(message, other)
            dist.recv(word, other) if leads else dist.send(word, other)

        return time_once(both, message.device)

    trip_s = min(there(torch.zeros(1, dtype=torch.int64)) for _ in range(TRIPS))
    way = 0.0
    for size in SIZES:
        seconds = there(torch.zeros(size, dtype=torch.uint8))
        way = size / max(seconds - trip_s, seconds / 2)
        more = torch.tensor([int(seconds < ENOUGH_S)])  # what the first says holds for both
        there(more)
        if not more.item():
            break
    return trip_s, way


def links_finding(seen: Sequence[Link], right: bool) -> Finding:
    """What was measured of each link, and whether a sum over all hosts was right."""
    facts = {"links": [vars(link) for link in seen], "right": right}
    if not right:
        return Finding(
            "links",
            "wrong",
            "a sum over all hosts is wrong",
            "do not trust a run over these links",
            facts,
        )
    slowest, farthest = (
        min(seen, key=lambda link: link.bytes_per_s),
        max(seen, key=lambda link: link.trip_s),
    )
    found = f"slowest {slowest}, {rate_text(slowest.bytes_per_s)}"
    found += f"; farthest {farthest}, {1000 * farthest.trip_s:.2g} ms there and back"
    usual = median(link.bytes_per_s for link in seen)
    if usual > UNEQUAL * slowest.bytes_per_s:
        advice = f"the median is {rate_text(usual)}: {slowest} sets the pace of all"
        return Finding("links", "note", found, advice, facts)
    if slowest.bytes_per_s < SLOW:
        advice = (
            "below 1 Gbit/s gradients take longer than most steps: local SGD or a codec, see"
            " docs/sync.md"
        )
        return Finding("links", "note", found, advice, facts)
    return Finding("links", "ok", found, "", facts)
