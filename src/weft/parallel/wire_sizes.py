"""How many bytes a message or a collective puts on the wire, for predictions and for transports."""

from __future__ import annotations

from collections.abc import Iterator

from weft.core import ReplicaView, RequestSize, Route

CHUNK_BYTES = 2**18  # the size of a ring's messages: one is added while the next is on its way
MAX_DIMS = 8  # the most dimensions of a tensor that crosses between two stages
HEADER_BYTES = (MAX_DIMS + 3) * 8  # before the first tensor of a kind: its shape and its dtype


def wire_bytes(kind: str, nbytes: int, size: int) -> float:
    """Bytes that one rank sends in a collective of `size` ranks over a ring (Patarasuk and Yuan,
    2009)."""
    if kind == "send":
        return nbytes
    return nbytes * (2 if kind == "all_reduce" else 1) * (size - 1) / size


def request_traffic(
    route: Route, local: int, asked: RequestSize, peers: ReplicaView, owner: int
) -> Iterator[tuple[str, int]]:
    """The collectives and messages with which this rank answers a request of a codec.

    Args:
        route: How replicas reach one another: by the backend's collectives, by a ring, by owners.
        local: Ranks of one host in the inner ring; 1 for a single ring.
        asked: What the codec asks for, and its size.
        peers: This rank's position among the replicas.
        owner: The position of the replica that owns the bucket.

    Yields:
        (kind, bytes) of each, in the order in which they are sent.
    """
    kind, elements, itemsize, _ = asked
    size, rank = peers.size, peers.index
    if route == "backend":
        name = {
            "sum": "all_reduce",
            "gather": "all_gather",
            "scatter": "all_to_all",
            "sum_scatter": "reduce_scatter",
        }
        yield name[kind], asked.nbytes * (1 if kind == "sum" else size)
    elif route == "owners":
        if rank != owner:
            yield "send", asked.nbytes
        elif not asked.final:
            yield from [("send", asked.nbytes)] * (size - 1)
    elif kind == "scatter":
        yield from [("send", asked.nbytes)] * (size - 1)
    else:
        rings = (
            [(size, rank)]
            if local == 1
            else [(local, rank % local), (size // local, rank // local)]
        )
        passed = _sum_sends if kind == "sum" else _gather_sends
        yield from (
            ("send", count * itemsize)
            for count in passed(elements, rings, max(1, CHUNK_BYTES // itemsize))
        )


def segment_bounds(n: int, parts: int) -> list[int]:
    """Where each of `parts` equal stretches of n elements begins, and where the last ends."""
    return [n * i // parts for i in range(parts + 1)]


def _sum_sends(n: int, rings: list[tuple[int, int]], per: int) -> Iterator[int]:
    """Elements of each message of a sum of n round these rings (size, rank)."""
    if not rings:
        return
    (size, rank), *outer = rings
    bounds = segment_bounds(n, size)
    own = (rank + 1) % size
    for first in (rank, own):
        for turn in range(size - 1):
            segment = (first - turn) % size
            yield from _cut(bounds[segment + 1] - bounds[segment], per)
    yield from (
        _sum_sends(bounds[own + 1] - bounds[own], outer, per)
        if size > 1
        else _sum_sends(n, outer, per)
    )


def _gather_sends(n: int, rings: list[tuple[int, int]], per: int) -> Iterator[int]:
    rows = 1
    for size, _ in rings:
        for _ in range(size - 1):
            yield from _cut(rows * n, per)
        rows *= size


def _cut(n: int, per: int) -> Iterator[int]:
    """Lengths of the chunks of n elements."""
    return (min(per, n - start) for start in range(0, n, per))
