"""`weft verify --deep` sees what a run does wrong when it goes back to a checkpoint."""

from __future__ import annotations

from pathlib import Path

from tests.run_files import TRAINED
from weft.core import load_run
from weft.verification.training_check import training_proofs
from weft.verification.training_definition import TrainingDefinition, define_training
from weft.verification.verify_run import deep_case

EXPERTS = "experts = 4\nactive = 2\nbalance = 0.1\ncapacity = 1.0"


def define(folder: Path, text: str) -> TrainingDefinition:
    path = folder / "run.toml"
    path.write_text(text.replace("skip = 5.0\n", ""))
    (found,) = define_training(*deep_case(load_run(path, {"train.rollback": "3.0"})))
    return found


def test_experts_are_counted_without_undone_steps(tmp_path: Path) -> None:
    found = define(tmp_path, TRAINED.replace("dropout = 0.1", EXPERTS))
    assert found.trajectory.taken_back
    proofs = training_proofs(found, "dp1", tmp_path)
    assert all(proof.equal for proof in proofs), proofs
