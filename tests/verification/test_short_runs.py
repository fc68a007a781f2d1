"""The short runs of `weft verify --deep` have nothing of a run that is for GPUs, or for who watches
it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from torch import Tensor

from tests.run_files import TRAINED
from tests.verification.test_training_proof import Padded
from weft.core import RunConfig, WeftError, load_run
from weft.core.run_config import PrecisionConfig
from weft.engine import StepResult
from weft.train.callbacks import WatchedRun
from weft.train.metrics import Line
from weft.verification.coverage import coverage
from weft.verification.training_check import training_proofs
from weft.verification.training_definition import define_training
from weft.verification.verify_run import deep_case


def load(folder: Path, more: str) -> RunConfig:
    """The run with more in its [train]."""
    path = folder / "run.toml"
    path.write_text(TRAINED.replace("skip = 5.0\n", more))
    return load_run(path)


def is_proven(run: RunConfig, folder: Path) -> None:
    (found,) = define_training(*deep_case(run))
    proofs = training_proofs(found, "dp1", folder)
    assert all(proof.equal for proof in proofs), proofs


def test_no_memory_of_gpus_is_recorded(tmp_path: Path) -> None:
    is_proven(load(tmp_path, "memory_snapshot = 10\n"), tmp_path)


class Ends:
    """A callback that ends the run after its first step."""

    def on_step_end(self, run: WatchedRun, result: StepResult, metrics: Line | None) -> None:
        run.stop("it was called")


def test_no_callback_is_called(tmp_path: Path) -> None:
    """The table says so."""
    name = "tests.verification.test_short_runs:Ends"
    more = f'callbacks = [{{ name = "{name}" }}]\nloggers = ["csv"]\n'
    run = load(tmp_path, more)
    is_proven(run, tmp_path)
    assert not [*tmp_path.rglob("metrics.csv")]
    table = [
        f"{row.how}: {row.what}" for row in coverage(run, 3, PrecisionConfig(compute="fp64"), "")
    ]
    assert f"not checked: train.callbacks, which verify leaves out: {name}" in table
    assert "not checked: train.loggers, which verify leaves out: csv" in table


class Stopped(Padded):
    """Each of two ranks gets SIGTERM when it reads its twentieth sample."""

    reads = 0

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.reads += 1
        if self.reads == 20 and os.environ.get("WORLD_SIZE") == "2":
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__getitem__(index)


def test_a_signal_ends_it(tmp_path: Path) -> None:
    """A run that saved and ended early is no difference from one device."""
    path = tmp_path / "run.toml"
    path.write_text(TRAINED.replace("test_training_proof:Padded", "test_short_runs:Stopped"))
    (found,) = define_training(*deep_case(load_run(path)))
    with pytest.raises(WeftError, match="stopped by a signal: the rest is not verified"):
        training_proofs(found, "dp2", tmp_path)
