"""One rank: sums tensors of each size by weft's ring, by gloo's all-reduce and through one rank, in turns.

    worker.py REPEATS OUTPUT SIZE...          bytes
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from weft.codecs import Sum
from weft.engine.wires import Owners, Ring


def main(repeats: int, output: str, sizes: list[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = [dist.new_group() for _ in range(3)]
    ring, owners = Ring(groups[0], [groups[0]]), Owners(groups[1], 0)
    ways: dict[str, Callable[[Tensor], object]] = {
        "ring": lambda x: ring.answer(Sum(x)),
        "gloo": lambda x: dist.all_reduce(x, group=groups[2]),
        "central": lambda x: owners.answer(Sum(x, final=False)),
    }
    rows = []
    for nbytes in sizes:
        x = torch.ones(nbytes // 4)
        for way, add in ways.items():
            add(x.clone())  # connects, and warms up
            times, sent = [], []
            for _ in range(repeats):
                mine = torch.full_like(x, float(dist.get_rank() + 1))
                dist.barrier()
                before, began = _sent_bytes(), time.perf_counter()
                add(mine)
                took = torch.tensor([time.perf_counter() - began])
                sent.append(_sent_bytes() - before)
                size = dist.get_world_size()
                assert bool((mine == size * (size + 1) / 2).all()), way
                dist.all_reduce(took, dist.ReduceOp.MAX)
                times.append(float(took))
            every: list = [None] * dist.get_world_size()
            dist.all_gather_object(every, statistics.median(sent))
            rows.append({"bytes": nbytes, "way": way, "s": statistics.median(times), "sent_bytes": every})
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _sent_bytes() -> int:
    """What has left this host."""
    found = re.search(rf"{os.environ['GLOO_SOCKET_IFNAME']}:\s*(.*)", Path("/proc/net/dev").read_text())
    return int(found[1].split()[8]) if found else 0


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], [int(size) for size in sys.argv[3:]])
