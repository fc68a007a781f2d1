"""`weft verify --deep` trains a pipeline without a flush beside one device with the same delays,
and sees what `weft train` does wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import Mutant, mutated
from tests.run_files import TRAINED
from weft.core import load_run
from weft.core.run_config import PrecisionConfig, RunConfig
from weft.verification.run_proofs import Proof
from weft.verification.training_check import (
    other_layout_proofs,
    training_proofs,
    verify_training,
)
from weft.verification.training_definition import TrainingDefinition, define_training
from weft.verification.verify_run import deep_case

# such a pipeline neither clips nor leaves steps out
DELAYED = TRAINED.replace("skip = 5.0\n", "").replace("clip = 1.0\n", "")
SLOW = DELAYED.replace("batch = 4", "batch = 8").replace("accumulate = 2", "accumulate = 4")


def load(folder: Path, versions: str = "stash", **pipeline: str) -> RunConfig:
    path = folder / "run.toml"
    more = "".join(f"{key} = {value}\n" for key, value in pipeline.items())
    path.write_text(f'{SLOW}[pipeline]\nschedule = "pipedream"\nversions = "{versions}"\n{more}')
    return load_run(path)


@pytest.fixture(scope="module")
def defined(tmp_path_factory: pytest.TempPathFactory) -> TrainingDefinition:
    (found,) = define_training(*deep_case(load(tmp_path_factory.mktemp("run"))), "pp2")
    return found


LAYOUTS = [("pp2", "stash"), ("pp2.dp2", "stash"), ("pp2", "2bw"), ("pp2", "vertical")]


@pytest.mark.grid(1, ci=1)
@pytest.mark.parametrize(("layout", "versions"), LAYOUTS)
def test_a_pipeline_trains_with_its_delays(tmp_path: Path, layout: str, versions: str) -> None:
    """And goes on from a checkpoint: on one device without delays, and from there with them."""
    run, *given = deep_case(load(tmp_path, versions))
    own = PrecisionConfig(compute="bf16") if versions == "2bw" else None
    (result,) = verify_training(run, *given, [layout], lambda result: None, own)
    assert result.passed, result.text()
    proofs = {proof.what: proof.shown for proof in result.proofs}
    told = f"pipedream, versions {versions}, 2 stages, by their own definition"
    assert proofs["delayed weights"] == told
    assert proofs["learning rate"] == "60 steps of warm-up, cosine"
    assert proofs["validated"] == "4 times, 3 batches each"
    resumed = [proof.shown.split(":")[0] for proof in result.proofs if "resumed" in proof.what]
    assert resumed == ["bit for bit", "on dp1", "from dp1"]
    assert (own is None) == ("in bf16" not in proofs)


def test_stages_of_equal_time_are_measured_once(tmp_path: Path) -> None:
    """Those of the run are those of the definition."""
    (found,) = define_training(*deep_case(load(tmp_path, cut='"time"')), "pp2")
    assert len(found.run.pipeline.cut) == 1
    proofs = training_proofs(found, "pp2", tmp_path)
    assert all(proof.equal for proof in proofs), proofs


STASH, LOOP = "weft.engine.pipeline.weight_stash", "weft.train.train_loop"
MUTANTS: dict[str, tuple[tuple[str, str, str, str], str]] = {
    # name: change, the first proof that sees it
    "weights of an older version": (
        (
            "weft.pipeline.weight_versions",
            "versions_used",
            "found[stage, microbatch] = done[stage]",
            "found[stage, microbatch] = max(0, done[stage] - 1)",
        ),
        "20 steps",
    ),
    "a gradient that a stage forgets": (
        (
            STASH,
            "WeightStash.done",
            "if leaf.grad is not None:",
            "if leaf.grad is not None and microbatch:",
        ),
        "20 steps",
    ),
    "a mean over all microbatches": (
        (STASH, "WeightStash.divisor", "self._shared[microbatch]", "self._plan.accumulate"),
        "20 steps",
    ),
    "a constant rate": ((LOOP, "TrainLoop.__call__", "rate * self.factor", "rate"), "20 steps"),
    "validation of a part of the batch": (
        (
            "weft.engine.inference",
            "Inference.evaluate",
            "total.add_(",
            "total.copy_(",
        ),
        "20 steps",
    ),
    "optimizer state not loaded": (
        (
            "weft.checkpoint.engine_files",
            "fill_engine",
            "engine.tensors(saved)",
            '(p for p in engine.tensors(saved) if "exp_avg_sq" not in p.name)',
        ),
        "resumed",
    ),
}


def wrong(defined: TrainingDefinition, folder: Path, *mutants: Mutant) -> list[Proof]:
    with mutated(*mutants):
        proofs = training_proofs(defined, "pp2", folder)
    return [proof for proof in proofs if not proof.equal]


@pytest.mark.grid(2, ci=1)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_seen(defined: TrainingDefinition, tmp_path: Path, name: str) -> None:
    change, sees = MUTANTS[name]
    found = wrong(defined, tmp_path, Mutant(*change))
    assert found and found[0].what.startswith(sees), found
    assert not any("Error" in proof.shown for proof in found), found


def test_delays_that_go_on_on_one_device_are_seen(
    defined: TrainingDefinition, tmp_path: Path
) -> None:
    """What one device does from a checkpoint is not what the pipeline does."""
    training_proofs(defined, "pp2", tmp_path)
    train, alone = defined.onward, defined.trajectory
    assert train is not None and train.lines[20]["loss"] != alone.lines[20]["loss"]
    proofs = other_layout_proofs(defined, "pp2", tmp_path, tmp_path / "whole")
    assert [proof.equal for proof in proofs] == [True, False]  # the second began with delays


def test_a_law_of_the_papers_is_named(tmp_path: Path) -> None:
    """Both sides would update after the same wrong microbatches."""
    late = Mutant(
        "weft.verification.plain.delayed_weights",
        "update_faults",
        "if ends != wanted:",
        "if ends == wanted:",
    )
    with mutated(late):
        (found,) = define_training(*deep_case(load(tmp_path)), "pp2")
        proofs = training_proofs(found, "pp2", tmp_path)
    (laws,) = [proof for proof in proofs if proof.what == "laws"]
    assert not laws.equal and "stage 0 updates after microbatches" in laws.shown, laws
