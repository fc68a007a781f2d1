"""Stages of a forward whose Python loops over samples are cut along as many as a microbatch has."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import weft
from tests.cases import BATCH, Subject, reference
from weft.nn.losses import mse
from weft.verification.compare import check_layout


class Loops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = [row.cumsum(0) for row in self.first(x)]
        return self.last(torch.stack(rows))


class Whole(Loops):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).cumsum(1))


def rows() -> dict[str, Tensor]:
    return {"x": torch.randn(BATCH, 3, 4), "target": torch.randn(BATCH, 3, 4)}


def sums(model: nn.Module, samples: int) -> int:
    """How many sums along positions stages pass by."""
    sample = {key: value[:samples] for key, value in rows().items()}
    plan = weft.plan(model, "pp2", batch=BATCH, accumulate=2, loss=mse, sample=sample)
    assert plan.staging is not None
    return sum(item.name == "cumsum" for item in plan.staging.items)


def test_it_is_cut_along_a_microbatch() -> None:
    assert sums(Loops(), 2) == sums(Loops(), 3) == BATCH // 2


def test_without_a_loop_along_the_sample() -> None:
    assert sums(Whole(), 2) == 1


def test_equals_one_device(pool) -> None:
    net = Subject(Loops, rows, mse)
    found = pool.run(check_layout, net.case(), "pp2", reference(net), world=2, timeout=60)[0]
    assert found.passed, found
