"""A model that calls `forward` of its blocks is laid as one that calls them; and means that are
rounding alone are no difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.cases import BATCH, Subject, reference
from weft.nn.losses import mse
from weft.verification.compare import check_layout

DIM, LENGTH = 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(self.up(x).relu())) + x


class Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return x


class Called(Direct):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Normed(nn.Module):
    """The mean that its second norm takes away is rounding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(DIM, affine=False), nn.BatchNorm1d(DIM)
        self.between = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x[:, 0]))).unsqueeze(1).expand_as(x)


def vectors() -> dict[str, Tensor]:
    shape = BATCH, LENGTH, DIM
    return {"x": torch.randn(shape), "target": torch.randn(shape)}


def result_of(pool: Any, kind: type[nn.Module], layout: str, **options: Any) -> Any:
    subject = Subject(kind, vectors, mse, tuple({"accumulate": 2, **options}.items()))
    world = weft.Layout.parse(layout).world
    return pool.run(check_layout, subject.case(), layout, reference(subject), world=world)[0]


@pytest.mark.parametrize("kind", [Direct, Called])
@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2", "pp2"])
def test_blocks_called_by_their_forward(pool: Any, layout: str, kind: type[nn.Module]) -> None:
    result = result_of(pool, kind, layout)
    assert result.passed, (result.first, result.stray, result.problem, result)


def test_blocks_called_by_their_forward_and_recomputed(pool: Any) -> None:
    result = result_of(pool, Direct, "fsdp2", recompute="full")
    assert result.passed, (result.first, result.stray, result.problem, result)


def test_a_mean_that_is_rounding_is_no_difference(pool: Any) -> None:
    result = result_of(pool, Normed, "dp2")
    assert result.passed, (result.first, result.stray, result.problem, result)
