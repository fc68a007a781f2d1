"""`weft verify --deep` sees what a run does wrong when it goes back to a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import Mutant, mutated
from tests.run_files import TRAINED
from weft.core import load_run
from weft.verification.run_proofs import Proof
from weft.verification.training_check import other_layout_proofs, training_proofs
from weft.verification.training_definition import TrainingDefinition, define_training
from weft.verification.verify_run import deep_case

BEST = "[checkpoint]\nevery = 50\nkeep_best = true\n"
EXPERTS = "experts = 4\nactive = 2\nbalance = 0.1\ncapacity = 1.0"


def define(folder: Path, text: str) -> TrainingDefinition:
    path = folder / "run.toml"
    path.write_text(text.replace("skip = 5.0\n", ""))
    (found,) = define_training(
        *deep_case(load_run(path, {"train.rollback": "3.0", "train.min_lr_ratio": "0.1"}))
    )
    return found


def test_experts_are_counted_without_undone_steps(tmp_path: Path) -> None:
    found = define(tmp_path, TRAINED.replace("dropout = 0.1", EXPERTS))
    assert found.trajectory.taken_back
    proofs = training_proofs(found, "dp1", tmp_path)
    assert all(proof.equal for proof in proofs), proofs


@pytest.fixture(scope="module")
def best(tmp_path_factory: pytest.TempPathFactory) -> TrainingDefinition:
    text = TRAINED.replace("seed = 3", "seed = 0") + BEST
    return define(tmp_path_factory.mktemp("run"), text)


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> TrainingDefinition:
    """It takes no step back."""
    path = tmp_path_factory.mktemp("run") / "run.toml"
    path.write_text(TRAINED.replace("skip = 5.0\n", "") + BEST)
    (found,) = define_training(*deep_case(load_run(path)))
    return found


def test_the_latest_checkpoint_may_be_the_best(best: TrainingDefinition, tmp_path: Path) -> None:
    """It is saved between the others, and the run goes back to it."""
    assert best.trajectory.taken_back
    assert any(step % best.step for step in best.trajectory.saved[:-1])
    proofs = training_proofs(best, "dp1", tmp_path)
    assert all(proof.equal for proof in proofs), proofs
    assert [proof.shown for proof in proofs if proof.what == "best"]
    proofs = other_layout_proofs(best, "dp1", tmp_path, tmp_path / "whole")
    assert proofs and all(proof.equal for proof in proofs), proofs


def wrong(defined: TrainingDefinition, folder: Path, *mutant: str) -> list[Proof]:
    with mutated(Mutant(*mutant)):
        proofs = training_proofs(defined, "dp1", folder)
    return [proof for proof in proofs if not proof.equal]


def test_lines_of_undone_steps_that_stay_are_seen(best: TrainingDefinition, tmp_path: Path) -> None:
    old, new = "if self._path.exists():", "if False:"
    first, *_ = wrong(best, tmp_path, "weft.train.metrics", "Metrics.back_to", old, new)
    assert "metrics.jsonl has two lines of step" in first.shown


MUTANTS = {
    "the worst checkpoint": (
        "weft.train.best_checkpoint",
        "BestCheckpoint.improves",
        "loss >= self.loss",
        "(self.step is not None and loss <= self.loss)",
    ),
    "the best one is not saved": (
        "weft.train.train_loop",
        "TrainLoop.__call__",
        "keep |= self.best.improves(step, self._evaluate(step))",
        "self.best.improves(step, self._evaluate(step))",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_another_best_checkpoint_is_seen(
    ahead: TrainingDefinition, tmp_path: Path, name: str
) -> None:
    found = wrong(ahead, tmp_path, *MUTANTS[name])
    assert found and not any("Error" in proof.shown for proof in found), found
