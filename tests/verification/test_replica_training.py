"""`weft verify --deep` trains replicas that step by themselves as their run does, and sees what
`weft train` does wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import Mutant, mutated
from tests.run_files import TRAINED
from weft.core import load_run
from weft.core.run_config import PrecisionConfig, RunConfig
from weft.verification.coverage import coverage
from weft.verification.training_check import other_layout_proofs, training_proofs
from weft.verification.training_definition import TrainingDefinition, define_training
from weft.verification.verified_settings import deep_sync
from weft.verification.verify_run import deep_case

FP64 = PrecisionConfig(compute="fp64")
SYNCS = {
    "local_sgd": 'name = "local_sgd"\nperiod = 50\n',
    "streaming": 'name = "diloco"\nperiod = 5\nfragments = 2\ndelay = 2\n',
    "long": (
        'name = "diloco"\nperiod = 10\nmomentum = 0.8\ncodec = { name = "topk", density = 0.25 }\n'
    ),
}


def load(folder: Path, sync: str) -> RunConfig:
    path = folder / "run.toml"
    path.write_text(f"{TRAINED}[sync]\n{sync}")
    return load_run(path)


@pytest.fixture(scope="module")
def defined(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainingDefinition]:
    found = {}
    for name, sync in SYNCS.items():
        run = load(tmp_path_factory.mktemp(name), sync)
        (found[name],) = define_training(*deep_case(run), "dp2")
    return found


LOOP, STEPS = "weft.train.train_loop", "weft.engine.replica_sync.local_steps"
MUTANTS: dict[str, tuple[str, str, str, str]] = {
    "validation of one replica": (
        "weft.engine.engine",
        "Engine.evaluate",
        "self.replicas.sum_over(totals, self.steps_done)",
        "pass",
    ),
    "the second replica at a constant rate": (
        LOOP,
        "TrainLoop.__call__",
        "rate * self.factor",
        "rate * (1.0 if self.engine.replicas.index else self.factor)",
    ),
    "the second replica is not clipped": (
        "weft.engine.grad_update",
        "GradUpdate.__call__",
        ", max=1.0)",
        ", max=1e9 if self.replicas.index else 1.0)",
    ),
    "all resume from the first replica": (
        "weft.train.run_folder",
        "resume_folder",
        "return own if",
        "return whole if",
    ),
    "a checkpoint that the second replica does not save": (
        LOOP,
        "TrainLoop._save",
        "if self.engine.replicas.servers_update and not self.engine.replicas.leads:",
        "if self.engine.replicas.index and step == self.run.checkpoint.every:",
    ),
    "anchors not loaded": (STEPS, "LocalStepReplicas.restored", "not self._anchored", "True"),
    "an exchange under way is not saved": (
        "weft.engine.replica_sync.outer_optimizer",
        "OuterOptimizer.kept",
        "if step is None or self.under_way(fragment, step):",
        "if step is None:",
    ),
}


OF_LONG_PERIODS = {
    "outer momentum not loaded": (
        STEPS,
        "LocalStepReplicas.shards",
        "if saved is None or full in saved:",
        'if saved is None or (full in saved and what != "momentum"):',
    ),
    "what a codec keeps, not loaded": (
        "weft.engine.checkpoint_state",
        "CheckpointState.tensors",
        "if saved is None or name in saved:",
        "if not saved:",
    ),
    "another momentum than the run's": (
        "weft.sync.diloco",
        "diloco",
        "lr, momentum, True",
        "lr, 0.5, True",
    ),
}


@pytest.mark.grid(1, ci=1)
@pytest.mark.parametrize("name", OF_LONG_PERIODS)
def test_a_fault_of_long_periods_is_seen(
    defined: dict[str, TrainingDefinition], tmp_path: Path, name: str
) -> None:
    """A run is resumed after an exchange."""
    with mutated(Mutant(*OF_LONG_PERIODS[name])):
        found = defined["long"]
        if "run's" in name:  # the definition has it of the plan, too
            run = load(tmp_path, SYNCS["long"])
            (found,) = define_training(*deep_case(run), "dp2")
        proofs = training_proofs(found, "dp2", tmp_path)
    assert [proof.shown for proof in proofs if not proof.equal]


@pytest.mark.grid(2, ci=2)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_of_replicas_is_seen(
    defined: dict[str, TrainingDefinition], tmp_path: Path, name: str
) -> None:
    with mutated(Mutant(*MUTANTS[name])):
        proofs = training_proofs(defined["streaming"], "dp2", tmp_path)
    wrong = [proof.shown for proof in proofs if not proof.equal]
    assert wrong
    assert not any("Error" in shown for shown in wrong), wrong


def test_a_replica_that_dies_is_an_error_and_nothing_else(
    defined: dict[str, TrainingDefinition], tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    dies = "assert not self.engine.replicas.index, 'no disk'; names, c ="
    with mutated(Mutant(LOOP, "TrainLoop._save", "names, c =", dies)):
        proofs = training_proofs(defined["streaming"], "dp2", tmp_path)
    assert not proofs[0].equal and "does not run: AssertionError: no disk" in proofs[0].shown
    assert "--resume" not in capfd.readouterr().err


def test_a_replica_without_a_checkpoint_is_one_error(
    defined: dict[str, TrainingDefinition], tmp_path: Path
) -> None:
    begins = "leads = bool("
    skips = f"if self.engine.replicas.index:\n            return\n        {begins}"
    never = Mutant(LOOP, "TrainLoop._save", begins, skips)
    with mutated(never):
        proofs = training_proofs(defined["streaming"], "dp2", tmp_path)
    wrong = [proof.shown for proof in proofs if not proof.equal]
    assert wrong == [f"has no checkpoint of replica-1 of step {defined['streaming'].step}"]


OF_BOTH_SIDES: dict[str, tuple[tuple[str, str, str, str], str]] = {
    "samples of the first replica alone": (
        (
            "weft.core.data_order",
            "data_rank_indices",
            "micro * data_size + data_rank",
            "micro * data_size",
        ),
        "sample 0 of a batch is taken 2 times",
    ),
    "masks that keep what they drop": (
        ("weft.nn.dropout_rng", "Randomness.keep", "places, p, site", "places, 1.0 - p, site"),
        "keeps",
    ),
    "seeds that do not differ": (
        (
            "weft.verification.replica_reference",
            "_case_of",
            "mix_key(case.seed, number) if number else case.seed",
            "case.seed",
        ),
        "two replicas draw the same numbers",
    ),
}


@pytest.mark.parametrize("name", OF_BOTH_SIDES)
def test_a_law_that_both_sides_break_is_named(tmp_path: Path, name: str) -> None:
    change, law = OF_BOTH_SIDES[name]
    run = load(tmp_path, SYNCS["local_sgd"])
    with mutated(Mutant(*change)):
        (found,) = define_training(*deep_case(run), "dp2")
        proofs = training_proofs(found, "dp2", tmp_path)
    (laws,) = [proof for proof in proofs if proof.what == "laws"]
    assert not laws.equal and law in laws.shown, laws


@pytest.mark.parametrize("name", SYNCS)
def test_replicas_train_as_defined(
    defined: dict[str, TrainingDefinition], tmp_path: Path, name: str
) -> None:
    proofs = training_proofs(defined[name], "dp2", tmp_path)
    assert all(proof.equal for proof in proofs), proofs
    assert defined[name].trajectory.happened >= {"clip"}
    shown = {proof.what: proof.shown for proof in proofs}
    assert shown["replicas"].startswith("2, by ")
    assert shown["laws"] == "of masks, random numbers and who takes which samples"
    assert "bit for bit" in shown.values()


def test_replicas_go_on_on_one_device_each(tmp_path: Path) -> None:
    """And those on one device each in ranks of their own."""
    (found,) = define_training(*deep_case(load(tmp_path, SYNCS["streaming"])), "dp2.tp2")
    proofs = training_proofs(found, "dp2.tp2", tmp_path)
    others = other_layout_proofs(found, "dp2.tp2", tmp_path, tmp_path)
    assert all(proof.equal for proof in (*proofs, *others)), (proofs, others)
    assert [proof.shown.split(":")[0] for proof in others] == ["on dp2", "from dp2"]


CODED = {
    "dp2": 'name = "diloco"\nperiod = 3\ncodec = { name = "topk", density = 0.1 }\n',
    "dp2.tp2": 'name = "diloco"\nperiod = 5\nfragments = 2\ndelay = 2\ncodec = "int4"\n',
}


@pytest.mark.parametrize("layout", CODED)
def test_replicas_train_with_their_codec(tmp_path: Path, layout: str) -> None:
    """And go on from a checkpoint with what it keeps, or anew on one device each."""
    (found,) = define_training(*deep_case(load(tmp_path, CODED[layout])), layout)
    proofs = training_proofs(found, layout, tmp_path)
    proofs += other_layout_proofs(found, layout, tmp_path, tmp_path)
    assert all(proof.equal for proof in proofs), proofs
    assert found.codec and not found.uncoded
    others = [proof.shown.split(":")[0] for proof in proofs if "dp2:" in proof.shown]
    assert others == ([] if layout == "dp2" else ["on dp2", "from dp2"])


OF_CODECS: dict[str, tuple[tuple[str, str, str, str], str]] = {
    # name: change, the first proof that sees it
    "feedback is never sent": (
        (
            "weft.core.codec",
            "MessageCodec.reduce",
            'x.add_(state["residual"])',
            'x.add_(state["residual"] * bool(state["residual"].norm() > 1e9))',
        ),
        "28 steps",
    ),
    "what is kept is not saved": (
        (
            "weft.engine.replica_sync.local_steps",
            "LocalStepReplicas.codec_states",
            "self.outer.states()",
            "()",
        ),
        "resumed",
    ),
}


@pytest.mark.parametrize("name", OF_CODECS)
def test_a_fault_of_a_codec_of_weights_is_seen(tmp_path: Path, name: str) -> None:
    change, sees = OF_CODECS[name]
    (found,) = define_training(*deep_case(load(tmp_path, CODED["dp2"])), "dp2")
    with mutated(Mutant(*change)):
        proofs = training_proofs(found, "dp2", tmp_path)
    wrong = [proof for proof in proofs if not proof.equal]
    assert wrong and wrong[0].what.startswith(sees), proofs
    assert not any("Error" in proof.shown for proof in wrong), wrong


def test_the_table_says_what_is_trained(tmp_path: Path) -> None:
    def table(sync: str) -> list[str]:
        run = load(tmp_path, sync)
        return [f"{row.how}: {row.what}" for row in coverage(run, 3, FP64, "")]

    assert deep_sync(load(tmp_path, SYNCS["local_sgd"]).sync).arguments == {"period": 4}
    assert deep_sync(load(tmp_path, SYNCS["streaming"]).sync).arguments["period"] == 5
    resumes = "saving; resuming on the same layout, and on others of as many replicas"
    assert f"with --deep: {resumes}" in table(SYNCS["streaming"])
    others = "not checked: resuming diloco with another number of replicas"
    assert others in table(SYNCS["streaming"])
    servers = table('name = "parameter_server"\nservers = 1\nstaleness = 2\n')
    assert "with --deep: validation" in servers
    resumes_so = "saving; resuming on the same layout, in its own order"
    assert f"with --deep: {resumes_so}" in servers
    never = "resuming parameter_server bit for bit: updates never come in the same order again"
    assert f"not checked: {never}" in servers
    assert "not checked: messages between replicas that step independently" in servers
    falls = "learning rate: 60 steps of warm-up, cosine"
    assert f"with --deep: {falls}" in servers
    assert f"with --deep: {falls}" in table(SYNCS["streaming"])
    coded = table('name = "bmuf"\nperiod = 5\ncodec = "int8"\n')
    kept = "training with codec int8; saving and resuming with what it keeps"
    assert f"with --deep: {kept}" in coded and f"with --deep: {resumes}" in coded
    served = table('name = "parameter_server"\nservers = 1\nstaleness = 2\ncodec = "int8"\n')
    kept = "training with codec int8; resuming without what it kept, which is not saved"
    assert f"with --deep: {kept}" in served
