"""One rank: sums tensors of each size by weft's ring, by gloo's all-reduce and through one rank, and sends as many bytes
over plain TCP. `run.py` starts it on every host.

    worker.py MBIT_PER_S OUTPUT SIZE...          bytes

Rank 0 writes JSON to OUTPUT: for each size and way the slowest rank's seconds, what each rank gave to `isend`, and what
left its host, both in bytes. Medians.
"""

from __future__ import annotations

import json
import os
import re
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.codecs import Sum
from weft.engine.wires import Owners, Ring

LONGEST_S = 6.0  # no sum is measured that takes one link longer
given = 0  # bytes that were given to isend


class Stream:
    """A plain TCP connection to the next rank, and one from the rank before."""

    def __init__(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        with socket.create_server(("0.0.0.0", 0)) as server:
            address = re.search(r"inet ([\d.]+)", os.popen("ip -4 -o addr show " + os.environ["GLOO_SOCKET_IFNAME"]).read())
            assert address is not None
            every: list[Any] = [None] * size
            dist.all_gather_object(every, (address[1], server.getsockname()[1]))
            self._next = socket.create_connection(every[(rank + 1) % size])
            self._before, _ = server.accept()
        self._next.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(self, x: Tensor) -> None:
        """Sends all of x, and takes as much."""
        out, place = memoryview(x.numpy()).cast("B"), bytearray(x.nbytes)
        sender = threading.Thread(target=self._next.sendall, args=(out,))
        sender.start()
        view = memoryview(place)
        while view:
            view = view[self._before.recv_into(view) :]
        sender.join()


def main(rate: float, output: str, sizes: list[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group() for _ in range(3)]
    ring, owners, stream = Ring(groups[0], [groups[0]]), Owners(groups[1], 0), Stream()
    dist.isend = _counted(dist.isend)
    ways: dict[str, Callable[[Tensor], object]] = {
        "tcp": lambda x: stream.exchange(x[: 2 * (size - 1) * x.numel() // size] if size == 2 else x.repeat(2)[: 2 * (size - 1) * x.numel() // size]),
        "ring": lambda x: ring.answer(Sum(x)),
        "gloo": lambda x: dist.all_reduce(x, group=groups[2]),
        "central": lambda x: owners.answer(Sum(x, final=False)),
    }
    rows = []
    for nbytes in sizes:
        x = torch.full((nbytes // 4,), float(rank + 1))
        times: dict[str, list[float]] = {}
        left: dict[str, list[int]] = {}
        messages: dict[str, int] = {}
        for turn in range(1 + (20 if nbytes < 2**20 else 3)):
            for way, add in ways.items():
                if way == "central" and 2 * (size - 1) * nbytes * 8 / (rate * 1e6) > LONGEST_S:
                    continue
                took, sent, messages[way] = _once(add, x.clone(), check=way != "tcp")
                if turn:  # the first connects, and warms up
                    times.setdefault(way, []).append(took)
                    left.setdefault(way, []).append(sent)
        for way, found in times.items():
            every: list[Any] = [None] * size
            dist.all_gather_object(every, (messages[way], statistics.median(left[way])))
            rows.append({"bytes": nbytes, "way": way, "s": statistics.median(found), "messages": [m for m, _ in every], "left": [s for _, s in every]})
    if rank == 0:
        Path(output).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _once(add: Callable[[Tensor], object], x: Tensor, check: bool) -> tuple[float, int, int]:
    """Seconds of the slowest rank; bytes that left this host, and that were given to isend."""
    dist.barrier()
    sent, messages, began = _sent_bytes(), given, time.perf_counter()
    add(x)
    took = torch.tensor([time.perf_counter() - began])
    size = dist.get_world_size()
    assert not check or bool((x == size * (size + 1) / 2).all())
    dist.all_reduce(took, dist.ReduceOp.MAX)
    # only now has what this rank gave to its socket left the host
    return float(took), _sent_bytes() - sent, given - messages


def _counted(isend: Callable[..., Any]) -> Callable[..., Any]:
    def send(x: Tensor, *arguments: Any, **named: Any) -> Any:
        global given
        given += x.nbytes
        return isend(x, *arguments, **named)

    return send


def _sent_bytes() -> int:
    """What has left this host."""
    found = re.search(rf"{os.environ['GLOO_SOCKET_IFNAME']}:\s*(.*)", Path("/proc/net/dev").read_text())
    return int(found[1].split()[8]) if found else 0


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], [int(size) for size in sys.argv[3:]])
