"""`weft verify --deep` trains under asynchronous servers as the run does, beside one device that
takes the same updates in the same order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import Mutant, mutated
from tests.run_files import TRAINED
from weft.core import ConfigError, load_run
from weft.core.run_config import RunConfig
from weft.verification.run_proofs import Proof
from weft.verification.training_check import check_deep, training_proofs
from weft.verification.training_definition import TrainingDefinition, define_training
from weft.verification.verify_run import deep_case

SERVERS = """
[sync]
name = "parameter_server"
servers = 2
staleness = 2
"""


def load(folder: Path) -> RunConfig:
    path = folder / "run.toml"
    path.write_text(TRAINED.replace("skip = 5.0\n", "") + SERVERS)  # servers refuse it
    return load_run(path)


@pytest.fixture(scope="module")
def defined(tmp_path_factory: pytest.TempPathFactory) -> TrainingDefinition:
    (found,) = define_training(*deep_case(load(tmp_path_factory.mktemp("run"))), "dp2")
    return found


def wrong(defined: TrainingDefinition, folder: Path, *mutants: Mutant) -> list[Proof]:
    with mutated(*mutants):
        proofs = training_proofs(defined, "dp2", folder)
    return [proof for proof in proofs if not proof.equal]


def test_servers_train_as_defined(defined: TrainingDefinition, tmp_path: Path) -> None:
    proofs = {proof.what: proof for proof in training_proofs(defined, "dp2", tmp_path)}
    assert all(proof.equal for proof in proofs.values()), proofs
    assert proofs["replicas"].shown == "2, by parameter_server, servers 2, staleness 2"
    assert proofs["clipped"].happened == "clip"
    assert proofs["validated"].shown == "4 times, 3 batches each"
    assert proofs[f"resumed at {defined.step}"].shown.startswith("in its order of updates: ")


LOOP, SERVER = "weft.train.train_loop", "weft.engine.replica_sync.async_parameter_server"
REPLICAS = "weft.engine.replica_sync.async_servers"
MUTANTS: dict[str, tuple[tuple[str, str, str, str], str]] = {
    # name: change, which proof sees it
    "the second replica at a constant rate": (
        (
            LOOP,
            "TrainLoop.__call__",
            "rate * self.factor",
            "rate * (1.0 if self.engine.replicas.index else self.factor)",
        ),
        "20 steps",
    ),
    "the second replica is not clipped": (
        (
            "weft.engine.grad_update",
            "GradUpdate.__call__",
            ", max=1.0)",
            ", max=1e9 if self.replicas.index else 1.0)",
        ),
        "20 steps",
    ),
    "validation of a part of the batch": (
        (
            LOOP,
            "TrainLoop._evaluate",
            "line = self.validation(step)",
            "object.__setattr__(self.validation, 'shares', 1); line = self.validation(step)",
        ),
        "20 steps",
    ),
    "a server that forgets on resuming": (
        (REPLICAS, "AsyncServerReplicas.connect", "if self._state_of(name)", "if False"),
        "resumed",
    ),
    "a checkpoint without the servers' state": (
        (REPLICAS, "AsyncServerReplicas.gather", "dict(state)", "{}"),
        "20 steps",
    ),
    "steps that begin anew on resuming": (
        (REPLICAS, "AsyncServerReplicas.connect", "int(steps)", "0 * int(steps)"),
        "resumed",
    ),
}


@pytest.mark.grid(2, ci=3)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_seen(defined: TrainingDefinition, tmp_path: Path, name: str) -> None:
    change, sees = MUTANTS[name]
    found = wrong(defined, tmp_path, Mutant(*change))
    assert found and found[0].what.startswith(sees), found
    assert not any("Error" in proof.shown for proof in found), found


def test_servers_of_several_ranks_are_refused(tmp_path: Path) -> None:
    _, case, *_ = deep_case(load(tmp_path))
    with pytest.raises(ConfigError, match="each rank of a replica has its own server"):
        check_deep("dp2.tp2", case.lay(case.model(), "dp2.tp2"))
