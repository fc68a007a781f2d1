"""One rank: sums tensors of each size by weft's ring, by gloo's all-reduce and through one rank,
and sends what a ring sends over plain TCP. `run.py` starts it on every host.

    worker.py MBIT_PER_S OUTPUT SIZE...          bytes

Rank 0 writes JSON to OUTPUT: for each size and way the slowest rank's seconds, what each rank gave
to `isend`, and what left its host, both in bytes. Medians over repetitions, in which the ways take
turns.
"""

from __future__ import annotations

import json
import os
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core.codec import AllReduceRequest
from weft.engine.replica_sync.transports import OwnerTransport, RingTransport

LONGEST_S = 5.0  # nothing goes through one rank that takes its link longer
SPENT_S = (
    5.0  # about, on the repetitions of one size and way, but at least 2 of them and at most 20
)

given = 0  # bytes that were given to isend


class Stream:
    """A plain TCP connection to the next rank, and one from the rank before."""

    def __init__(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        command = ["ip", "-4", "-o", "addr", "show", os.environ["GLOO_SOCKET_IFNAME"]]
        address = re.search(
            r"inet ([\d.]+)", subprocess.run(command, capture_output=True, text=True).stdout
        )
        assert address is not None
        with socket.create_server(("0.0.0.0", 0)) as server:
            every: list[Any] = [None] * size
            dist.all_gather_object(every, (address[1], server.getsockname()[1]))
            self._next = socket.create_connection(every[(rank + 1) % size])
            self._before, _ = server.accept()
        self._next.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(self, nbytes: int) -> None:
        """Sends so many bytes, and takes as many."""
        sender = threading.Thread(target=self._next.sendall, args=(bytes(nbytes),))
        sender.start()
        left = memoryview(bytearray(nbytes))
        while left:
            left = left[self._before.recv_into(left) :]
        sender.join()


def main(rate: float, output: str, sizes: list[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    groups = [dist.new_group() for _ in range(3)]
    ring, owners, stream = (
        RingTransport(groups[0], [groups[0]]),
        OwnerTransport(groups[1], 0),
        Stream(),
    )
    dist.isend = _counted(dist.isend)
    ways: dict[str, Callable[[Tensor], object]] = {
        "tcp": lambda x: stream.exchange(2 * (size - 1) * x.nbytes // size),
        "ring": lambda x: ring.answer(AllReduceRequest(x)),
        "gloo": lambda x: dist.all_reduce(x, group=groups[2]),
        "central": lambda x: owners.answer(AllReduceRequest(x, final=False)),
    }
    rows = []
    for nbytes in sizes:
        x = torch.full((nbytes // 4,), float(dist.get_rank() + 1))
        through_one = 2 * (size - 1) * nbytes * 8 / (rate * 1e6) <= LONGEST_S
        repeats = min(20, max(2, int(SPENT_S * rate * 1e6 / 8 / 2 / nbytes)))
        found: dict[str, list[tuple[float, int, int]]] = {}
        if nbytes == sizes[0]:
            for way, add in ways.items():  # connects
                _once(add, x.clone(), sums=way != "tcp")
        for turn in range(repeats):
            for way, add in ways.items():
                if way != "central" or (through_one and turn < 3):
                    found.setdefault(way, []).append(_once(add, x.clone(), sums=way != "tcp"))
        for way, times in found.items():
            seconds, left, messages = (statistics.median(each) for each in zip(*times))
            every: list[Any] = [None] * size
            dist.all_gather_object(every, (messages, left))
            sent, wire = ([int(one[i]) for one in every] for i in (0, 1))
            rows.append(
                {
                    "bytes": nbytes,
                    "way": way,
                    "s": seconds,
                    "messages": sent,
                    "left": wire,
                    "n": len(times),
                }
            )
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _once(add: Callable[[Tensor], object], x: Tensor, sums: bool) -> tuple[float, int, int]:
    """Seconds of the slowest rank; bytes that left this host, and that were given to isend."""
    size = dist.get_world_size()
    dist.barrier()
    left, messages, began = _left_bytes(), given, time.perf_counter()
    add(x)
    took = torch.tensor([time.perf_counter() - began])
    messages = given - messages
    assert not sums or bool((x == size * (size + 1) / 2).all())
    dist.all_reduce(took, dist.ReduceOp.MAX)
    # by now what this rank gave to its socket has left the host
    return float(took), _left_bytes() - left, messages


def _counted(isend: Callable[..., Any]) -> Callable[..., Any]:
    def send(x: Tensor, *arguments: Any, **named: Any) -> Any:
        global given
        given += x.nbytes
        return isend(x, *arguments, **named)

    return send


def _left_bytes() -> int:
    """What has left this host."""
    found = re.search(
        rf"{os.environ['GLOO_SOCKET_IFNAME']}:\s*(.*)", Path("/proc/net/dev").read_text()
    )
    return int(found[1].split()[8]) if found else 0


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], [int(size) for size in sys.argv[3:]])
