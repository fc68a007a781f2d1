"""Dropout of what all samples share, and of what only some data reach: the same on every layout, or
refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.cases import BATCH, Subject, reference
from weft.core.errors import Refusal
from weft.nn.losses import mse
from weft.verification.compare import check_layout

DIM, LENGTH = 8, 4


class Positions(nn.Module):
    """Drops out its table of positions. `alone`: before it gets a dim for samples."""

    def __init__(self, alone: bool):
        super().__init__()
        self.alone, self.drop = alone, nn.Dropout(0.5)
        self.table = nn.Parameter(torch.randn(LENGTH, DIM))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + (self.drop(self.table) if self.alone else self.drop(self.table[None]))
        for block in self.blocks:
            x = block(x)
        return self.drop(x)


class Choosing(nn.Module):
    """Each sample goes to one of two experts, which drop out."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        y, chosen = torch.zeros_like(x), (x[:, 0, 0] > 0).long()
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if rows.numel():
                y = y.index_add(0, rows, expert(x[rows]))
        return y


def vectors() -> dict[str, Tensor]:
    shape = BATCH, LENGTH, DIM
    return {"x": torch.randn(shape), "target": torch.randn(shape)}


def holds(pool: Any, subject: Subject, layout: str) -> None:
    world = weft.Layout.parse(layout).world
    result = pool.run(check_layout, subject.case(), layout, reference(subject), world=world)[0]
    assert result.passed, (result.first, result.stray, result.problem, result)


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "pp2"])
@pytest.mark.parametrize("alone", [True, False])
def test_what_all_samples_share(pool: Any, alone: bool, layout: str) -> None:
    holds(pool, Subject(partial(Positions, alone), vectors, mse, (("accumulate", 2),)), layout)


def test_a_shape_that_may_be_one_sample_is_refused(pool: Any) -> None:
    each = (("accumulate", BATCH // 2),)
    holds(pool, Subject(partial(Positions, True), vectors, mse, each), "dp2")
    with pytest.raises(Refusal, match="does not follow from the shape"):
        holds(pool, Subject(partial(Positions, False), vectors, mse, each), "dp2")


@pytest.mark.parametrize("layout", ["dp2", "fsdp2"])
def test_dropout_where_data_choose_is_refused(pool: Any, layout: str) -> None:
    with pytest.raises(Refusal, match="only where its data say so"):
        holds(pool, Subject(Choosing, vectors, mse), layout)
