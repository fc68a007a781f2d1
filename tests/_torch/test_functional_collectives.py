"""What torch must keep doing for weft._torch.functional_collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from weft._torch.functional_collectives import all_gather, all_reduce, all_to_all, reduce_scatter


def found(compiled: bool) -> tuple[list[float], ...]:
    x, group = torch.tensor([1.0, 2.0]) + 10 * dist.get_rank(), dist.new_group()

    def run(x: Tensor) -> tuple[Tensor, ...]:
        return (
            all_reduce(x, "max", group),
            all_reduce(x, "sum", group),
            all_gather(x, group),
            reduce_scatter(x, group),
            all_to_all(x, group),
        )

    torch.compiler.reset()
    run = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    return tuple(each.tolist() for each in (*run(x), x))


@pytest.mark.parametrize("compiled", [False, True])
def test_what_each_rank_gets(pool: Any, compiled: bool) -> None:
    both = [11, 12], [12, 14], [1, 2, 11, 12]
    first, second = pool.run(found, compiled, world=2)
    assert first == (*both, [12], [1, 11], [1, 2])
    assert second == (*both, [14], [2, 12], [11, 12])
