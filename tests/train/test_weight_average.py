"""train.ema: averages of weights, in steps, validations, checkpoints and exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.mutants import Mutant, mutated
from tests.run_files import TRAINED
from tests.train.test_hf_checkpoint import begun, files_of
from weft import checkpoint
from weft.core import ConfigError, load_run
from weft.core.run_config import RunConfig
from weft.train import check_run, export_weights, train
from weft.verification.training_check import (
    TrainingDefinition,
    define_training,
    other_layout_proofs,
    training_proofs,
)
from weft.verification.verify_run import deep_case

AVERAGED = "ema = 0.8\nema_warmup = true\nseed = 3\n"


def load(folder: Path, **more: str) -> RunConfig:
    path = folder / "run.toml"
    path.write_text(TRAINED.replace("seed = 3\n", AVERAGED))
    return load_run(path, {key.replace("__", "."): value for key, value in more.items()})


@pytest.fixture(scope="module")
def defined(tmp_path_factory: pytest.TempPathFactory) -> list[TrainingDefinition]:
    return define_training(*deep_case(load(tmp_path_factory.mktemp("run"))))


@pytest.mark.grid(1, ci=1)
@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2", "pp2"])
def test_it_is_that_of_one_device(
    defined: list[TrainingDefinition], tmp_path: Path, layout: str
) -> None:
    """With steps that are skipped and steps that are taken back; resumed, and on one device."""
    assert any(name.startswith("ema/") for name in defined[0].trajectory.final)
    for number, each in enumerate(defined):
        here = tmp_path / str(number)
        proofs = training_proofs(each, layout, here)
        proofs += other_layout_proofs(each, layout, here, here / "whole")
        assert all(proof.equal for proof in proofs), proofs


AVERAGE, LOOP = "weft.engine.weight_average", "weft.train.train_loop"
VALIDATION = "weft.train.validation"
MUTANTS = {
    "no warm-up": (AVERAGE, "WeightAverage.update", "if self.warmup", "if False"),
    "of the step before": (AVERAGE, "WeightAverage.update", "steps_done\n", "steps_done - 1\n"),
    "of skipped steps too": (LOOP, "TrainLoop.__call__", "and not unread[-1].skipped", ""),
    "validation without": (
        VALIDATION,
        "Validation.__call__",
        "self.average.in_use()",
        "nullcontext()",
    ),
    "not put back": (
        AVERAGE,
        "WeightAverage.in_use",
        "finally:\n            self._swap()",
        "finally:\n            pass",
    ),
    "not loaded": (AVERAGE, "WeightAverage.tensors", "full not in saved", "full in saved"),
}


@pytest.mark.grid(1, ci=1)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_seen(defined: list[TrainingDefinition], tmp_path: Path, name: str) -> None:
    with mutated(Mutant(*MUTANTS[name])):
        proofs = training_proofs(defined[0], "fsdp2", tmp_path)
    wrong = [proof.shown for proof in proofs if not proof.equal]
    assert wrong and not any("Error" in shown for shown in wrong), wrong


def test_what_is_exported(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", "tied")
    train(run.model_copy(update={"train": run.train.model_copy(update={"ema": 0.9})}), False)
    saved = checkpoint.read_index(Path(run.output) / "checkpoints").tensors
    export_weights(Path(run.output), tmp_path / "weights")
    export_weights(Path(run.output), tmp_path / "averages", averaged=True)
    weights, averages = files_of(tmp_path / "weights"), files_of(tmp_path / "averages")
    assert weights.keys() == averages.keys()
    with checkpoint.CheckpointReader(
        checkpoint.checkpoint_path(Path(run.output) / "checkpoints", 2),
        checkpoint.read_index(Path(run.output) / "checkpoints"),
    ) as reader:
        for name, average in averages.items():
            assert torch.equal(average, reader.read_tensor(f"ema/{name}"))
            assert not torch.equal(average, weights[name])
    assert len([name for name in saved if name.startswith("ema/")]) == len(averages)
    plain = begun(tmp_path / "plain", "tied")
    train(plain, False)
    with pytest.raises(ConfigError, match="the checkpoint of step 2 has no averages"):
        export_weights(Path(plain.output), tmp_path / "none", averaged=True)


def test_an_average_may_begin_later(tmp_path: Path) -> None:
    """A checkpoint without it: the average begins with its weights."""
    run = begun(tmp_path / "run", "tied", steps=4)
    short = run.train.model_copy(update={"steps": 2})
    train(run.model_copy(update={"train": short}), False)
    later = run.train.model_copy(update={"ema": 0.5})
    train(run.model_copy(update={"train": later}), True)
    saved = checkpoint.read_index(Path(run.output) / "checkpoints").tensors
    assert any(name.startswith("ema/") for name in saved)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"sync__name": "local_sgd"}, "replicas under local_sgd have"),
        ({"train__ema": "1.0"}, "train.ema = 1.0"),
        ({"pipeline__schedule": "pipedream", "layout__axes": "pp2"}, "pipedream updates each"),
    ],
)
def test_refusals(tmp_path: Path, more: dict[str, str], says: str) -> None:
    bare = TRAINED.replace("seed = 3\n", AVERAGED)
    for line in ("clip = 1.0\n", "skip = 5.0\n", "rollback = 3.0\n"):
        bare = bare.replace(line, "")
    path = tmp_path / "run.toml"
    path.write_text(bare)
    with pytest.raises(ConfigError, match=says):
        check_run(load_run(path, {k.replace("__", "."): v for k, v in more.items()}))


def test_warm_up_of_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TRAINED)
    with pytest.raises(ConfigError, match=r"train\.ema_warmup = True: has no effect without ema"):
        load_run(path, {"train.ema_warmup": json.dumps(True)})
