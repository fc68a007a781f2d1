"""What torch must keep doing for weft._torch.functional_collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from weft._torch.functional_collectives import all_gather, all_reduce, all_to_all, reduce_scatter


def reduced() -> tuple[list[float], list[float], list[float]]:
    x = torch.tensor([1.0, 2.0]) * (dist.get_rank() + 1)
    name = dist.new_group().group_name
    return x.tolist(), all_reduce(x, "max", name).tolist(), all_reduce(x, "sum", name).tolist()


def test_all_reduce_gives_a_new_tensor(pool: Any) -> None:
    for rank, found in enumerate(pool.run(reduced, world=2)):
        assert found == ([rank + 1.0, 2.0 * (rank + 1)], [2.0, 4.0], [3.0, 6.0])


def moved() -> list[list[float]]:
    x, group = torch.tensor([1.0, 2.0]) + 10 * dist.get_rank(), dist.new_group()
    found = [f(x, group).tolist() for f in (all_gather, reduce_scatter, all_to_all)]
    return [*found, x.tolist()]


def test_what_each_rank_gets(pool: Any) -> None:
    first, second = pool.run(moved, world=2)
    assert first == [[1, 2, 11, 12], [12], [1, 11], [1, 2]]
    assert second == [[1, 2, 11, 12], [14], [2, 12], [11, 12]]
