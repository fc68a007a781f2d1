"""What ranks tell one another as JSON."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from weft.core import gather_json
from weft.launch.local_workers import Pool


def exchanged(only_first: bool) -> list[Any]:
    rank = dist.get_rank()
    value = [None, {"name": ["é" * 1000 * rank, 1.5]}, -rank][rank]
    return gather_json(value, None, only_first)


@pytest.mark.parametrize("only_first", [False, True])
def test_every_rank_is_heard(pool: Pool, only_first: bool) -> None:
    whole = [None, {"name": ["é" * 1000, 1.5]}, -2]
    first, *others = pool.run(exchanged, only_first, world=3)
    assert first == whole and others == [[] if only_first else whole] * 2


def test_a_process_alone() -> None:
    assert gather_json((1, "a")) == [[1, "a"]]
