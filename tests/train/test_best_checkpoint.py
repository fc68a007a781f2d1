"""The checkpoint of the lowest validation loss stays, through resumes and on other layouts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.train.test_trainer import curve, make, saved
from weft.checkpoint import CHECKPOINTS
from weft.checkpoint.index import saved_steps
from weft.cli.app import app
from weft.core.errors import CheckpointError, ConfigError
from weft.core.run_config import RunConfig
from weft.launch.local_workers import Pool
from weft.train import run_checks
from weft.train.best_checkpoint import BestCheckpoint, best_step
from weft.train.trainer import train

STEPS, CUT = 12, 9
# a rate that rises, so that the loss falls, and rises again
SETTINGS: dict[str, Any] = {
    "train__steps": STEPS,
    "train__decay": "constant",
    "train__warmup": CUT,
    "train__clip": 100.0,
    "train__eval_every": 1,
    "optimizer__lr": 0.3,
    "checkpoint__keep": 1,
    "precision__compute": "fp64",
    "checkpoint__keep_best": True,
}


def kept(run: RunConfig) -> list[int]:
    return saved_steps(Path(run.output) / CHECKPOINTS)


def best_of(run: RunConfig) -> int:
    return min(curve(run, "val_loss"), key=lambda line: line[1])[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    run = make(tmp_path_factory.mktemp("whole"), **SETTINGS)
    train(run, False)
    return run


def test_it_stays_beside_the_latest(whole: RunConfig) -> None:
    best = best_of(whole)
    assert 1 < best < CUT - 1
    assert kept(whole) == [best, STEPS]
    assert best_step(Path(whole.output)) == best


def test_it_is_saved_between_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path, **SETTINGS, checkpoint__every=0)
    train(run, False)
    assert kept(run) == [best_of(run)]
    assert f"after step {best_of(run)}, whose checkpoint is kept" in capfd.readouterr().out


def test_without_the_key_the_latest_alone_stays(tmp_path: Path) -> None:
    run = make(tmp_path, **SETTINGS | {"checkpoint__keep_best": False})
    train(run, False)
    assert kept(run) == [STEPS]
    with pytest.raises(ConfigError, match="kept no best checkpoint"):
        best_step(Path(run.output))


@pytest.mark.parametrize("axes", ["dp2", "fsdp2", "pp2"])
def test_a_resumed_run_knows_it(pool: Pool, tmp_path: Path, whole: RunConfig, axes: str) -> None:
    pool.run(train, make(tmp_path, axes, **SETTINGS | {"train__steps": CUT}), False, world=2)
    run = make(tmp_path, "dp1", **SETTINGS)
    assert kept(run) == [best_of(run), CUT]
    train(run, True)
    best = best_of(whole)
    assert kept(run) == [best, STEPS]
    for name, want in saved(whole, best).items():
        torch.testing.assert_close(saved(run, best)[name], want)


def test_commands_take_it(whole: RunConfig) -> None:
    shown = CliRunner().invoke(app, ["checkpoint", "show", whole.output, "--step", "best"])
    assert shown.exit_code == 0
    assert shown.output.split()[:3] == ["step", str(best_of(whole)), "(here:"]
    wrong = CliRunner().invoke(app, ["checkpoint", "show", whole.output, "--step", "lowest"])
    assert wrong.exit_code == 2 and "Write a number, or best" in wrong.output


@pytest.mark.parametrize(
    ("axes", "settings", "says"),
    [
        ("dp1", {}, "there is no validation"),
        ("dp2", {"train__eval_every": 2, "sync__name": "local_sgd"}, "under local_sgd"),
    ],
)
def test_what_has_no_best_checkpoint_is_refused(
    tmp_path: Path, axes: str, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        run_checks.check_run(make(tmp_path, axes, checkpoint__keep_best=True, **settings))


@pytest.mark.parametrize("found", [3, [3], [-1, 0.5], ["3", 0.5], [3, "0.5"], [True, 0.5]])
def test_what_a_checkpoint_says_of_it_is_checked(found: Any) -> None:
    best = BestCheckpoint(True)
    with pytest.raises(CheckpointError, match="is not a step with its validation loss"):
        best.restore({"best": found})
    assert best.step is None and best.loss == math.inf
