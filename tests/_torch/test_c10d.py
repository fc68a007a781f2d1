"""What torch must keep doing for weft._torch.c10d."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from weft._torch.c10d import default_store, flight_record, group_names


def seen() -> tuple[bytes, bool, list[str]]:
    store, rank = default_store(), dist.get_rank()
    store.set(f"here/{rank}", str(rank))
    group = dist.new_group()
    dist.all_reduce(torch.ones(3), group=group)
    names = [name for name, each in group_names().items() if each is group]
    ops = [entry["profiling_name"] for entry in flight_record().get("entries", ())]
    return store.get(f"here/{1 - rank}"), bool(names), ops


def test_ranks_meet_at_the_store_and_collectives_are_recorded(pool: Any) -> None:
    for rank, (other, named, ops) in enumerate(pool.run(seen, world=2)):
        assert other == str(1 - rank).encode() and named
        assert any("all_reduce" in op.replace("allreduce", "all_reduce") for op in ops)
