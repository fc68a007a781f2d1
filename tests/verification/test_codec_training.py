"""`weft verify --deep` trains with the run's codec, beside one device that does so by the codec's
definition, and sees what `weft train` does wrong with what codecs keep."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import Mutant, mutated
from tests.run_files import TRAINED
from weft.core import load_run
from weft.core.run_config import PrecisionConfig, RunConfig
from weft.verification.coverage import coverage
from weft.verification.run_proofs import Proof
from weft.verification.training_check import (
    TrainingResult,
    other_layout_proofs,
    training_proofs,
    verify_training,
)
from weft.verification.training_definition import TrainingDefinition, define_training
from weft.verification.verify_run import deep_case

WITHOUT_SKIP = TRAINED.replace("skip = 5.0\n", "")  # codecs that keep a residual refuse it
DGC = '{ name = "dgc", density = 0.1, clip = 0.5, warmup = 12 }'


def load(folder: Path, codec: str, text: str = WITHOUT_SKIP, **beside: str) -> RunConfig:
    path = folder / "run.toml"
    path.write_text(f"{text}[sync]\ncodec = {codec}\n")
    return load_run(path, {f"train.{key}": value for key, value in beside.items()})


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> TrainingDefinition:
    """Steps are taken back in it."""
    run = load(tmp_path_factory.mktemp("run"), '"int8"', rollback="3.0")
    return define_training(*deep_case(run), "dp2")[0]


@pytest.fixture(scope="module")
def dgc(tmp_path_factory: pytest.TempPathFactory) -> TrainingDefinition:
    text = WITHOUT_SKIP.replace("adamw", "sgd")
    return define_training(*deep_case(load(tmp_path_factory.mktemp("run"), DGC, text)), "dp2")[0]


def all_proofs(defined: TrainingDefinition, layout: str, folder: Path) -> list[Proof]:
    proofs = training_proofs(defined, layout, folder)
    return proofs + other_layout_proofs(defined, layout, folder, folder / "unused")


def test_a_codec_trains_as_defined(int8: TrainingDefinition, tmp_path: Path) -> None:
    proofs = all_proofs(int8, "dp2", tmp_path)
    assert all(proof.equal for proof in proofs), proofs
    shown = [proof.shown.split(": ")[0] for proof in proofs[-3:]]
    assert shown == ["bit for bit", "on dp1", "from dp1"]
    (codec,) = [proof.shown for proof in proofs if proof.what == "codec"]
    assert codec.startswith("int8 (feedback True, bits 8, size 128")
    assert int8.trajectory.happened == {"clip", "rollback"}


OTHERS = {
    "fsdp2": '{ name = "int4", stochastic = true }',
    "dp2.tp2": '{ name = "topk", density = 0.1 }',
}


@pytest.mark.slow(ci=False)
@pytest.mark.parametrize("layout", OTHERS)
def test_on_other_layouts(tmp_path: Path, layout: str) -> None:
    (defined,) = define_training(*deep_case(load(tmp_path, OTHERS[layout])), layout)
    proofs = all_proofs(defined, layout, tmp_path)
    assert defined.codec and all(proof.equal for proof in proofs), proofs


def test_what_dgc_clips_by_is_saved(dgc: TrainingDefinition, tmp_path: Path) -> None:
    proofs = training_proofs(dgc, "dp2", tmp_path)
    assert all(proof.equal for proof in proofs), proofs
    assert proofs[-1].shown == "bit for bit"


@pytest.mark.slow
def test_rounding_that_a_codec_makes_grow_is_measured(tmp_path: Path) -> None:
    """Where a factorisation leaves rounding of a zero, AdamW makes a step of it."""
    (defined,) = define_training(*deep_case(load(tmp_path, '"powersgd"')), "dp2")
    proofs = training_proofs(defined, "dp2", tmp_path)
    assert all(proof.equal for proof in proofs), proofs
    assert "rounding grows: " in proofs[0].shown


UPDATE, LOOP, STATE = (
    "weft.engine.grad_update",
    "weft.train.train_loop",
    "weft.engine.checkpoint_state",
)
FORGET = '[s["residual"].zero_() for s in {}.reducer.exchange.states]'
TAKEN_BACK = "fill_engine(self.average or self.engine, folder, kept)"
MUTANTS: dict[str, tuple[tuple[str, str, str, str], str]] = {
    # name: change, a proof that sees it
    "what is kept is not saved": (
        (STATE, "CheckpointState.tensors", "in self.codec_tensors():", "in ():"),
        "resumed",
    ),
    "what is kept is not loaded": (
        (STATE, "CheckpointState.tensors", "if saved is None or name in saved:", "if not saved:"),
        "resumed",
    ),
    "what is kept is forgotten when steps are taken back": (
        (
            LOOP,
            "TrainLoop._go_back",
            TAKEN_BACK,
            f"{TAKEN_BACK}; {FORGET.format('self.engine._update')}",
        ),
        "28 steps",
    ),
    "feedback is never sent": (
        (
            "weft.core.codec",
            "MessageCodec.reduce",
            'x.add_(state["residual"])',
            'x.add_(state["residual"] * bool(state["residual"].norm() > 1e9))',
        ),
        "28 steps",
    ),
}


@pytest.mark.grid(2, ci=1)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_seen(int8: TrainingDefinition, tmp_path: Path, name: str) -> None:
    change, sees = MUTANTS[name]
    with mutated(Mutant(*change)):
        proofs = training_proofs(int8, "dp2", tmp_path)
    wrong = [proof for proof in proofs if not proof.equal]
    assert any(proof.what.startswith(sees) for proof in wrong), proofs
    assert not any("Error" in proof.shown for proof in wrong), wrong


def test_what_dgc_clips_by_is_not_saved(dgc: TrainingDefinition, tmp_path: Path) -> None:
    change = UPDATE, "GradUpdate.load_scalars", 'scalars.get("exchange_scale")', "None"
    with mutated(Mutant(*change)):
        proofs = training_proofs(dgc, "dp2", tmp_path)
    assert [proof.what for proof in proofs if not proof.equal] == [f"resumed at {dgc.step}"]


@pytest.mark.slow(ci=False)
def test_a_codec_that_no_definition_tells_is_left_out_and_named(tmp_path: Path) -> None:
    """Four replicas sum bf16 in any order."""
    run, *given = deep_case(load(tmp_path, '"bf16"', TRAINED.replace("batch = 4", "batch = 8")))
    results: list[TrainingResult] = verify_training(
        run, *given, ["dp4", "dp2"], lambda result: None
    )
    assert all(result.passed for result in results), results
    why = "the definition cannot compute what a replica sends: sums of 4 are rounded in any order"
    assert [result.uncoded for result in results] == [why, ""]
    assert f"  codec             identity instead: {why}" in results[0].text()
    table = [f"{row.how}: {row.what}" for row in covered(run, results)]
    kept = "training with codec bf16; saving and resuming with what it keeps"
    assert f"not checked: training with codec bf16 on dp4: {why}" in table
    assert f"checked: {kept}" in table
    assert f"checked: {kept}" not in [f"{row.how}: {row.what}" for row in covered(run, results[:1])]
    assert f"with --deep: {kept}" in [f"{row.how}: {row.what}" for row in covered(run, [])]


def covered(run: RunConfig, results: list[TrainingResult]) -> list:
    return coverage(run, 3, PrecisionConfig(compute="fp64"), "", results)


def test_a_run_on_one_device_that_fails_is_told(tmp_path: Path, int8: TrainingDefinition) -> None:
    """Nothing goes on from its checkpoint, which is missing."""
    old = "began, t, folder, company = "
    new = f"assert run.world > 1 or resume, 'too small'; {old}"
    with mutated(Mutant("weft.train.trainer", "_train", old, new)):
        proofs = all_proofs(int8, "dp2", tmp_path)
    (wrong,) = (proof for proof in proofs if not proof.equal)
    assert "from dp1: does not run: AssertionError: too small" in wrong.shown
