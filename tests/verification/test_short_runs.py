"""The short runs of `weft verify --deep` have nothing of a run that is for GPUs, or for who watches
it."""

from __future__ import annotations

from pathlib import Path

from tests.run_files import TRAINED
from weft.core import RunConfig, load_run
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
