"""The trial of gradients: a model that adds a loss in its backward, or clips gradients there, is
refused before the first step, and what is proportional is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.cases import BATCH, LENGTH, VOCAB
from tests.verification.nets_of_the_web import QAT, Equilibrium
from weft.core.errors import UnsupportedModel
from weft.launch import Pool
from weft.losses import mse, next_token
from weft.nn import with_loss

DIM = 16


class AddsLoss(torch.autograd.Function):
    """DeepSeek's AddAuxiliaryLoss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, torch.ones((), dtype=grad.dtype)


class Balanced(nn.Module):
    """Experts that are weighed by a gate, and a loss of how it weighs them, in training alone."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.gate, self.own = nn.Linear(DIM, 4), own
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        out = sum(shares[..., i, None] * expert(x) for i, expert in enumerate(self.experts))
        if not self.training:
            return out
        loss = 0.01 * shares.square().sum(-1)
        return AddsLoss.apply(out, loss.mean()) if self.own else with_loss(out, loss.sum())


class Decoder(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.blocks = nn.ModuleList(Balanced(own) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Clipped(nn.Module):
    """Clips the gradient of its state at each step (Graves 2013)."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(1, DIM), nn.Linear(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), DIM)
        for value in x.split(1, dim=1):
            h = self.cell(value, h)
            if h.requires_grad:
                h.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return self.out(h)


def adds_loss() -> nn.Module:
    return Decoder(own=True)


def weft_adds_loss() -> nn.Module:
    return Decoder(own=False)


def words() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH))
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}


def vectors() -> dict[str, Tensor]:
    return {"x": torch.randn(BATCH, 6), "target": torch.randn(BATCH, 4)}


def qat_vectors() -> dict[str, Tensor]:
    return {"x": torch.randn(BATCH, 8), "target": torch.randn(BATCH, 4)}


def first_loss(build: Callable[[], nn.Module], data: Any, loss: Any, layout: str) -> float:
    torch.manual_seed(0)
    model, batch = build(), data()
    sample = {key: value[:2] for key, value in batch.items()}
    plan = weft.plan(model, layout, batch=BATCH, loss=loss, sample=sample)
    engine = weft.Engine(model, plan, optimizer=torch.optim.AdamW, loss=loss)
    return float(engine.step(engine.local(batch)).loss)


@pytest.mark.parametrize("layout", ["dp1", "dp2", "fsdp2", "pp2"])
def test_a_loss_that_backward_adds(pool: Pool, layout: str) -> None:
    world = weft.Layout.parse(layout).world
    with pytest.raises(UnsupportedModel, match=r"gradient of blocks\.\d\.gate\.\w+ is not prop"):
        pool.run(first_loss, adds_loss, words, next_token, layout, world=world)


@pytest.mark.parametrize("layout", ["dp2", "fsdp2"])
def test_a_gradient_that_backward_clips(pool: Pool, layout: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"or clips gradients there"):
        pool.run(first_loss, Clipped, vectors, mse, layout, world=2)


@pytest.mark.parametrize("layout", ["dp1", "dp2"])
def test_what_is_proportional(pool: Pool, layout: str) -> None:
    world = weft.Layout.parse(layout).world
    pool.run(first_loss, weft_adds_loss, words, next_token, layout, world=world)
    pool.run(first_loss, QAT, qat_vectors, mse, layout, world=world)
    pool.run(first_loss, Equilibrium, qat_vectors, mse, layout, world=world)


def test_verify_refuses_it_and_what_the_refusal_says_is_equal() -> None:
    with pytest.raises(UnsupportedModel, match=r"add it by weft\.nn\.with_loss"):
        weft.verify(adds_loss, "tp2", words(), loss=next_token)
    report = weft.verify(weft_adds_loss, "dp2", words(), loss=next_token)
    assert report.passed, report.text()


def test_functions_are_watched_for_one_forward() -> None:
    before = vars(AddsLoss)["forward"]
    with pytest.raises(UnsupportedModel):
        first_loss(adds_loss, words, next_token, "dp1")
    assert vars(AddsLoss)["forward"] is before
