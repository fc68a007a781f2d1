"""Linears and convolutions of a model without chains, each divided by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from transformers.pytorch_utils import Conv1D

import weft
from tests.cases import BATCH, Subject, reference, seeded
from weft.core import Refusal
from weft.verification.compare import check_layout


class Lone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect")
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.along = nn.Conv1d(4, 4, 3, padding=1, bias=False)
        self.lstm = nn.LSTM(16, 8, batch_first=True)
        self.stored = Conv1D(12, 8)
        self.normed = spectral_norm(nn.Linear(12, 8))
        self.drop = nn.Dropout(0.2)
        self.twice = nn.Linear(8, 8)
        self.fixed = nn.Linear(8, 8)
        self.odd = nn.Linear(8, 3)
        self.made = nn.Parameter(torch.randn(BATCH, 8))  # as many rows as samples

    def forward(self, image: Tensor) -> Tensor:
        x = self.up(self.depthwise(self.norm(self.stem(image)).relu()))
        x, _ = self.lstm(self.along(x.flatten(2)).unflatten(2, (4, -1)).flatten(1, 2))
        x = self.drop(self.normed(self.stored(x[:, -1]).tanh()))
        made = self.twice(self.made) + self.fixed(self.made)
        return self.odd((self.twice(x) + made.mean(0)).softmax(-1))


def images() -> dict[str, Tensor]:
    return {"image": torch.randn(BATCH, 3, 4, 4), "target": torch.randn(BATCH, 3)}


def mse(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (output - batch["target"]).square().sum(), output.numel()


NET = Subject(Lone, images, mse)
# module -> dim
CUT = {"stem": 0, "up": 1, "along": 0, "stored": 1, "twice": 0, "fixed": 0, "odd": 1}


@pytest.mark.parametrize("layout", ["tp2", "tp4", "dp2.tp2", "pp2.tp2", "fsdp2.tp2"])
def test_equals_one_device(pool: Any, layout: str) -> None:
    world = weft.Layout.parse(layout).world
    found = pool.run(check_layout, NET.case(), layout, reference(NET), world=world, timeout=60)[0]
    assert found.passed, (found, found.stray)


def test_each_is_cut_by_its_outputs_or_its_inputs() -> None:
    plan = NET.case().lay(seeded(NET.build), "tp2")
    weights = (p for s in plan.steps for p in s.params if p.name.endswith(".weight"))
    assert {p.name[: -len(".weight")]: p.cut.dim for p in weights if p.cut} == CUT
    assert any("7 linears and convolutions are cut each by itself" in n for n in plan.notes)


def test_none_is_cut_beside_a_chain() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8), Lone().odd)
    plan = weft.plan(net, "tp2", batch=BATCH, sample={"input": torch.randn(BATCH, 8)})
    cut = {s.module for s in plan.steps if any(p.cut for p in s.params)}
    assert cut == {"0", "2"}


CONVOLUTIONS = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3))


@pytest.mark.parametrize("size", [3, 5])
def test_ranks_that_divide_nothing_are_refused(size: int) -> None:
    sample = {"input": torch.randn(BATCH, 3, 8, 8)}
    with pytest.raises(Refusal, match="finds no attention"):
        weft.plan(CONVOLUTIONS, f"tp{size}", batch=BATCH, sample=sample)


def test_a_model_that_is_one_layer_is_refused() -> None:
    with pytest.raises(Refusal, match="finds no attention"):
        weft.plan(nn.Linear(8, 4), "tp2", batch=BATCH, sample={"input": torch.randn(BATCH, 8)})


def test_none_is_cut_without_a_sample() -> None:
    with pytest.raises(Refusal, match=r"finds no attention.* got no `sample`"):
        weft.plan(CONVOLUTIONS, "tp2", batch=BATCH)


class Picks(nn.Module):
    """How many rows there are in `x[mask]` follows from elements."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        best = self.score(x).sum(-1)
        return self.head(x[best == best.max(1, keepdim=True).values].view(len(x), 8))


class Skips(Picks):
    """Which modules run does, too."""

    def forward(self, x: Tensor) -> Tensor:
        large = x[self.score(x) > 0]
        if large.numel() > 0:
            return self.head(x.mean(1)) * large.mean()
        return x.mean(1)[:, :4]


def sets() -> dict[str, Tensor]:
    return {"x": torch.randn(BATCH, 5, 8), "target": torch.randn(BATCH, 4)}


def test_shapes_that_follow_from_elements_are_no_reason_to_leave_all_whole(pool: Any) -> None:
    net = Subject(Picks, sets, mse)
    found = pool.run(check_layout, net.case(), "tp2", reference(net), world=2, timeout=60)[0]
    assert found.passed, (found, found.stray)


def test_modules_that_data_choose_are() -> None:
    with pytest.raises(Refusal, match="finds no attention"):
        Subject(Skips, sets, mse).case().lay(seeded(Skips), "tp2")
