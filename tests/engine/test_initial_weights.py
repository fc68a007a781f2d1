"""Ranks that begin with their shards: losses, the trial before the first step, other seeds."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import weft
from weft._torch.modes import without_dispatch_modes
from weft._torch.trees import tree_map
from weft.core import ConfigError, UnsupportedModel
from weft.engine import Engine
from weft.launch import Pool
from weft.losses import mse, next_token
from weft.models import decoder
from weft.nn.init_recording import InitRecording

CPU = torch.device("cpu")


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def started(
    layout: str, seed: int = 0, seed_of_rank: bool = False, **arguments: Any
) -> tuple[float, float]:
    """Losses of two steps on tokens, by an engine whose trial has a sample."""
    import torch.distributed as dist

    seed += dist.get_rank() if seed_of_rank else 0
    model = weft.deferred_init(partial(decoder, **arguments), seed)
    assert all(p.is_meta for p in model.parameters())
    tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens}
    sample = {key: value[:2] for key, value in batch.items()}
    plan = weft.plan(model, layout, batch=4, loss=next_token, sample=sample)
    engine = Engine(model, plan, optimizer=sgd, loss=next_token, device="cpu", sample=sample)
    losses = [float(engine.step(engine.local(batch)).loss) for _ in range(2)]
    engine.close()
    return losses[0], losses[1]


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2", "tp2+sequence", "fsdp2.tp2", "pp2.tp2"])
def test_losses_are_those_of_one_device(pool: Pool, layout: str) -> None:
    """The trial of `tp` and of experts runs the whole model from the shards of all ranks."""
    arguments = {"vocab": 64, "layers": 2, "dim": 32, "heads": 4}
    found = pool.run(partial(started, layout, **arguments), world=weft.Layout.parse(layout).world)
    alone = pool.run(partial(started, "dp1", **arguments), world=1)[0]
    assert found[0] == pytest.approx(alone, rel=1e-5)
    assert found[0][1] < found[0][0]


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_ranks_with_other_seeds_are_refused(pool: Pool, layout: str) -> None:
    arguments = {"vocab": 64, "layers": 1, "dim": 32, "heads": 4}
    with pytest.raises(UnsupportedModel, match="build different models"):
        pool.run(partial(started, layout, seed_of_rank=True, **arguments), world=2)


class Solved(nn.Module):
    """Its build reads what torch solves, as that of a spline does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linalg.lstsq(torch.eye(3), torch.rand(3, 2)).solution)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def solved_otherwise_on_another_rank() -> None:
    import torch.distributed as dist

    solve = InitRecording._on_real_tensors
    off = 1e-7 * dist.get_rank()

    def rounded(*args: Any) -> Any:
        found = solve(*args)
        with without_dispatch_modes():
            return tree_map(lambda t: t + off if t.is_floating_point() else t, found)

    with mock.patch.object(InitRecording, "_on_real_tensors", rounded):
        model = weft.deferred_init(Solved)
    plan = weft.plan(model, "dp2", batch=2, loss=mse)
    Engine(model, plan, optimizer=sgd, loss=mse, device="cpu")


def test_numbers_that_a_build_computes_otherwise_on_each_rank_are_refused(pool: Pool) -> None:
    with pytest.raises(UnsupportedModel, match=r"the same model, but linalg_lstsq gives them"):
        pool.run(solved_otherwise_on_another_rank, world=2)


def test_a_model_that_nobody_can_fill_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    plan = weft.plan(model, "dp1", batch=2)
    with pytest.raises(ConfigError, match=r"deferred_init"):
        Engine(model, plan, optimizer=sgd, loss=next_token, device="cpu")
