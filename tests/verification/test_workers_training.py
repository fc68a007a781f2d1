"""`weft verify --deep` trains a run with [workers] beside one device, and sees what the driver and
its workers do wrong beside gradients."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import Mutant, mutated
from tests.run_files import TRAINED
from weft.core import load_run
from weft.core.run_config import PrecisionConfig, RunConfig
from weft.verification.coverage import coverage
from weft.verification.training_check import (
    TrainingResult,
    training_proofs,
    verify_training,
)
from weft.verification.training_definition import TrainingDefinition, define_training
from weft.verification.verify_run import deep_case

ALONE = TRAINED.replace('axes = "dp2"', 'axes = "dp1"')
WORKERS = '[workers]\nstorage = ["embedding"]\nbig = ["blocks.1"]\n'


def load(folder: Path, text: str = ALONE, **beside: str) -> RunConfig:
    path = folder / "run.toml"
    path.write_text(text + WORKERS)
    return load_run(path, {f"train.{key}": value for key, value in beside.items()})


@pytest.fixture(scope="module")
def defined(tmp_path_factory: pytest.TempPathFactory) -> TrainingDefinition:
    (found,) = define_training(*deep_case(load(tmp_path_factory.mktemp("run"))))
    return found


def trained(run: RunConfig, precision: PrecisionConfig | None = None) -> TrainingResult:
    exact, *given = deep_case(run)
    (found,) = verify_training(exact, *given, ["dp1"], lambda result: None, precision)
    return found


def test_workers_train_as_one_device_does(tmp_path: Path) -> None:
    """With steps that are left out, and others that are taken back."""
    result = trained(load(tmp_path, rollback="3.0"), PrecisionConfig(compute="bf16"))
    assert result.passed, result.text()
    assert result.text().startswith("dp1, workers storage, big, as weft train runs it: equal")
    assert result.happened == ("clip", "rollback", "skip")
    resumed = [proof.shown.split(":")[0] for proof in result.proofs if "resumed" in proof.what]
    assert resumed == ["bit for bit", "bit for bit", "bit for bit", "on dp1", "from dp1"]
    assert result.proofs[-1].what == "in bf16" and "bit for bit" in result.proofs[-1].shown


def test_metrics_of_experts_are_left_out(tmp_path: Path) -> None:
    """Those of a run with [workers] have none."""
    text = ALONE.replace("dropout = 0.1", "experts = 4\nbalance = 0.1\ncapacity = 0.75")
    result = trained(load(tmp_path, text.replace("skip = 5.0\n", "")))
    assert result.passed, result.text()
    assert "experts" not in [proof.what for proof in result.proofs]


REMOTE, STATE = "weft.engine.rpc.remote_engine", "weft.engine.rpc.remote_state"
MUTANTS: dict[str, tuple[tuple[str, str, str, str], str]] = {
    # name: change, the first proof that sees it
    "workers at a constant rate": (
        (
            "weft.train.train_loop",
            "TrainLoop.__call__",
            "rate * self.factor",
            'rate * (self.factor if self.engine.here == "driver" else 1.0)',
        ),
        "28 steps",
    ),
    "gradients below the norm are scaled up": (
        (REMOTE, "Remote._step", ", max=1.0)", ", max=1e9)"),
        "28 steps",
    ),
    "workers take a step that is left out": (
        (
            REMOTE,
            "Remote.finish",
            "self._wait_for(step)",
            "self._wait_for(step); "
            "factor = 1.0 if factor is None and self.here != DRIVER else factor",
        ),
        "28 steps",
    ),
    "workers validate with dropout": (
        (REMOTE, "Remote.answer", "module.training = training", "module.training = True"),
        "28 steps",
    ),
    "optimizer state of workers is not saved": (
        (
            STATE,
            "RemoteState.tensors",
            "self.optimizer.state.get(p, {}).items()",
            '(self.optimizer.state.get(p, {}) if self.here == "driver" else {}).items()',
        ),
        "28 steps",
    ),
    "optimizer state of workers is not loaded": (
        (
            STATE,
            "RemoteState.tensors",
            "if saved is not None:",
            'if saved is not None and self.here == "driver":',
        ),
        "resumed",
    ),
}


@pytest.mark.grid(2, ci=2)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_of_workers_is_seen(defined: TrainingDefinition, tmp_path: Path, name: str) -> None:
    change, sees = MUTANTS[name]
    with mutated(Mutant(*change)):
        proofs = training_proofs(defined, "dp1", tmp_path)
    wrong = [proof for proof in proofs if not proof.equal]
    assert wrong and wrong[0].what.startswith(sees), proofs
    assert not any("Error" in proof.shown for proof in wrong), wrong


def test_the_table_says_where_they_resume(tmp_path: Path) -> None:
    fp64 = PrecisionConfig(compute="fp64")
    table = [f"{row.how}: {row.what}" for row in coverage(load(tmp_path), 3, fp64, "")]
    assert "with --deep: saving; resuming with [workers], and on one device" in table
    assert "not checked: calls between the driver and its workers" in table
