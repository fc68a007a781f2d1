"""A loss or a schedule that fails in the middle of a run: all ranks end, and nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.train.test_trainer import make, saved
from weft.callbacks import WatchedRun
from weft.checkpoint import latest_step
from weft.core import ConfigError, RunConfig, StepFailed, WorkerDied
from weft.data import stdlib
from weft.launch.local_workers import Pool
from weft.losses import next_token
from weft.models import decoder
from weft.train.trainer import train

HERE = "tests.train.test_failing_steps"
done = 0  # steps of the run that this process is in


class Counts:
    """Tells the losses here how many steps are done."""

    def on_run_begin(self, run: WatchedRun) -> None:
        globals()["done"] = run.step

    def on_step_end(self, run: WatchedRun, result: Any, metrics: Any) -> None:
        globals()["done"] = run.step

    def on_run_failed(self, run: WatchedRun, error: BaseException) -> None:
        globals()["done"] = 0


def fails_on_rank_1(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    if done == 4 and os.environ["RANK"] == "1":
        raise ValueError("no such\nlabel")
    return next_token(output, batch)


def fails_everywhere(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    if done == 4:
        raise ValueError("no such\nlabel")
    return next_token(output, batch)


def falls_until_step_4(steps: int) -> Callable[[int], float]:
    return lambda step: 1 / (4 - step)


def failing(folder: Path, axes: str, loss: str, **settings: Any) -> RunConfig:
    """A run whose last checkpoint before the step that fails, the fifth, is that of step 3."""
    run = make(folder, axes, train__loss=loss, **settings)
    table = run.train.model_copy(update={"callbacks": (f"{HERE}:Counts",)})
    return run.model_copy(update={"train": table})


@pytest.mark.parametrize(
    ("axes", "loss"),
    [
        ("dp2", "fails_on_rank_1"),
        ("fsdp2", "fails_on_rank_1"),
        ("pp2", "fails_on_rank_1"),
        ("tp2", "fails_everywhere"),
        ("dp1", "fails_everywhere"),
    ],
)
def test_a_loss_that_fails_loses_no_step(tmp_path: Path, pool: Pool, axes: str, loss: str) -> None:
    ranks = 1 if axes == "dp1" else 2
    run = failing(tmp_path / "failed", axes, f"{HERE}:{loss}")
    with pytest.raises(WorkerDied) as caught:
        pool.run(train, run, False, world=ranks)
    who = 1 if loss == "fails_on_rank_1" else 0
    said = caught.value.report.rstrip()
    start = f"the loss failed in step 5 on rank {who}: ValueError: no such label ("
    assert said.startswith(f"{start}test_failing_steps.py, line ") and "\n" not in said
    assert latest_step(Path(run.output) / "checkpoints") == 4
    whole = {"train__loss": f"{HERE}:{loss}"}  # nobody counts, so nothing fails
    pool.run(train, make(tmp_path / "failed", axes, **whole), True, world=ranks)
    other = make(tmp_path / "whole", axes, **whole)
    pool.run(train, other, False, world=ranks)
    found, expected = saved(run, 6), saved(other, 6)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_schedule_that_fails_loses_no_step(tmp_path: Path, pool: Pool) -> None:
    own = {"lr_schedule__build": f"{HERE}:falls_until_step_4", "train__decay": "constant"}
    run = make(tmp_path, "dp2", train__warmup=0, **own)
    with pytest.raises(ConfigError, match="fails at step 4: ZeroDivisionError") as caught:
        pool.run(train, run, False, world=2)
    assert caught.value.exit_code == 1 and "\n" not in str(caught.value)
    assert latest_step(Path(run.output) / "checkpoints") == 4


def test_in_a_loop_of_ones_own_it_is_the_cause() -> None:
    plan = weft.plan(
        model := decoder(vocab=32, dim=16, layers=1, heads=2, seq_len=8), "dp1", batch=4
    )
    engine = weft.Engine(model, plan, optimizer=torch.optim.SGD, loss=fails_everywhere)
    data = stdlib(seq_len=8, max_bytes=10_000)
    batch = weft.data.collate([data[i] for i in range(4)])
    batch = {key: value % 32 for key, value in batch.items()}
    globals()["done"] = 0
    engine.step(batch)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    globals()["done"] = 4
    with pytest.raises(StepFailed, match="in step 2 on rank 0") as caught:
        engine.step(batch)
    assert isinstance(caught.value.__cause__, ValueError)
    assert engine.steps_done == 1
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
