"""`weft verify --deep` trains under asynchronous servers as the run does, beside one device that
takes the same updates in the same order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mutants import Mutant, mutated
from tests.run_files import TRAINED
from weft.core import ConfigError, load_run
from weft.core.run_config import PrecisionConfig, RunConfig
from weft.verification.coverage import coverage
from weft.verification.run_proofs import Proof
from weft.verification.training_check import (
    check_deep,
    other_layout_proofs,
    training_proofs,
    verify_training,
)
from weft.verification.training_definition import TrainingDefinition, define_training
from weft.verification.verify_run import deep_case

SERVERS = """
[sync]
name = "parameter_server"
servers = 2
staleness = 2
"""
FP64 = PrecisionConfig(compute="fp64")


def load(folder: Path, codec: str = "") -> RunConfig:
    path = folder / "run.toml"
    more = f"codec = {codec}\n" if codec else ""
    path.write_text(TRAINED.replace("skip = 5.0\n", "") + SERVERS + more)  # servers refuse it
    return load_run(path)


def define(folder: Path, codec: str = "") -> TrainingDefinition:
    (found,) = define_training(*deep_case(load(folder, codec)), "dp2")
    return found


@pytest.fixture(scope="module")
def defined(tmp_path_factory: pytest.TempPathFactory) -> TrainingDefinition:
    return define(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> TrainingDefinition:
    return define(tmp_path_factory.mktemp("run"), '{ name = "int4", stochastic = true }')


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


def test_servers_resume_with_the_state_of_muon(tmp_path: Path) -> None:
    """Two optimizers, each of its own weights, go on from what was saved of each."""
    path = tmp_path / "run.toml"
    muon = 'name = "muon"\nadamw = ["embedding.*", "head.*", "*norm*"]'
    text = TRAINED.replace("skip = 5.0\n", "").replace('name = "adamw"', muon)
    path.write_text(text + SERVERS)
    (found,) = define_training(*deep_case(load_run(path)), "dp2")
    proofs = training_proofs(found, "dp2", tmp_path)
    assert all(proof.equal for proof in proofs), proofs


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


@pytest.mark.grid(2, ci=2)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_seen(defined: TrainingDefinition, tmp_path: Path, name: str) -> None:
    change, sees = MUTANTS[name]
    found = wrong(defined, tmp_path, Mutant(*change))
    assert found and found[0].what.startswith(sees), found
    assert not any("Error" in proof.shown for proof in found), found


# ---- with a codec --------------------------------------------------------------------------------

CODECS = [
    '"int8"',
    '{ name = "topk", density = 0.2 }',
    '{ name = "powersgd", rank = 2 }',
    '"bf16"',
]


@pytest.mark.grid(2)
@pytest.mark.parametrize("codec", CODECS)
def test_servers_train_with_their_codec(tmp_path: Path, codec: str) -> None:
    found = define(tmp_path, codec)
    assert found.codec and not found.uncoded
    proofs = training_proofs(found, "dp2", tmp_path)
    assert all(proof.equal for proof in proofs), proofs
    assert other_layout_proofs(found, "dp2", tmp_path, tmp_path) == []


def test_what_a_codec_keeps_and_draws(int4: TrainingDefinition, tmp_path: Path) -> None:
    proofs = {proof.what: proof for proof in training_proofs(int4, "dp2", tmp_path)}
    assert all(proof.equal for proof in proofs.values()), proofs
    shown = proofs["codec"].shown
    assert shown.startswith("int4 (feedback True, bits 4") and "stochastic True" in shown
    assert shown.endswith("with what it keeps from step to step, which no checkpoint has")
    assert proofs[f"resumed at {int4.step}"].shown.startswith("in its order of updates: ")


SYNC, CODEC = "weft.core.sync", "weft.core.codec"
OF_CODECS: dict[str, tuple[tuple[str, str, str, str], str]] = {
    "feedback is never sent": (
        (
            CODEC,
            "MessageCodec.reduce",
            'x.add_(state["residual"])',
            'x.add_(state["residual"] * bool(state["residual"].norm() > 1e9))',
        ),
        "20 steps",
    ),
    "the second worker keeps nothing": (
        (
            CODEC,
            "MessageCodec.reduce",
            'torch.sub(x, own, out=state["residual"])',
            'state["residual"].copy_((x - own) * (not peers.bucket.endswith("worker 1")))',
        ),
        "20 steps",
    ),
    "same draws by every worker": (
        (SYNC, "AsyncServers.worker_view", "{part} of worker {worker}", "{part}"),
        "laws",
    ),
    "another codec from a checkpoint on": (
        (
            SERVER,
            "AsyncWorker.connect",
            "codec = self._sync.codec.state(part.shapes, part.flat(), bucket)",
            "codec = self._sync.codec.state(part.shapes, part.flat(), bucket); "
            'codec["residual"] += 1e-3 * bool(steps)',
        ),
        "resumed",
    ),
}


@pytest.mark.grid(1, ci=1)
@pytest.mark.parametrize("name", OF_CODECS)
def test_a_fault_of_a_codec_is_seen(int4: TrainingDefinition, tmp_path: Path, name: str) -> None:
    change, sees = OF_CODECS[name]
    found = wrong(int4, tmp_path, Mutant(*change))
    assert found and found[0].what.startswith(sees), found
    assert not any("Error" in proof.shown for proof in found), found


ROUNDING = Mutant(  # in the order of a run, and not in turns
    "weft.verification.server_definition",
    "_Links.__call__",
    "if plain.undecided:",
    "if hasattr(torch, 'in_its_order'):",
)
IN_ORDER = Mutant(
    "weft.verification.training_definition",
    "DefinitionInOrder.train",
    "case, run = ",
    "torch.in_its_order = True; case, run = ",
)


def test_a_codec_of_which_an_order_makes_signs_of_rounding_is_left_out(tmp_path: Path) -> None:
    """The definition in turns tells what is sent, and that in the order of the run does not."""
    run, *given = deep_case(load(tmp_path, '"int8"'))
    with mutated(ROUNDING, IN_ORDER):
        (result,) = verify_training(run, *given, ["dp2"], lambda result: None)
    assert result.passed, result.text()
    why = result.uncoded
    assert re.search("sends: worker [01] encodes 0 numbers that are only rounding", why)
    assert f"  codec             identity instead: {why}" in result.text()
    table = [f"{row.how}: {row.what}" for row in coverage(run, 3, FP64, "", [result])]
    assert f"not checked: training with codec int8 on dp2: {why}" in table


def test_the_table_says_what_is_kept(tmp_path: Path) -> None:
    """A checkpoint has nothing of what workers keep."""
    table = [f"{row.how}: {row.what}" for row in coverage(load(tmp_path, '"int8"'), 3, FP64, "")]
    kept = "training with codec int8; resuming without what it kept, which is not saved"
    assert f"with --deep: {kept}" in table
    assert "with --deep: validation" in table


def test_servers_of_several_ranks_are_refused(tmp_path: Path) -> None:
    _, case, *_ = deep_case(load(tmp_path))
    with pytest.raises(ConfigError, match="each rank of a replica has its own server"):
        check_deep("dp2.tp2", case.lay(case.model(), "dp2.tp2"))
