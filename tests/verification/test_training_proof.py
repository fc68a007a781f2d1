"""`weft verify --deep` sees what `weft train` does wrong beside gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.mutants import Mutant, mutated
from tests.run_files import TRAINED
from weft.core import load_run
from weft.verification.training_check import other_layout_proofs, training_proofs
from weft.verification.training_definition import TrainingDefinition, define_training
from weft.verification.verify_run import deep_case

BESIDE = {"train.min_lr_ratio": "0.1", "train.rollback": "3.0"}


class Padded:
    """Random tokens, of which some labels do not count."""

    def __init__(self, split: str = "train"):
        random = torch.Generator().manual_seed(7 if split == "train" else 8)
        self.tokens = torch.randint(31, (40, 7), generator=random)
        self.ends = torch.randint(2, 7, (40,), generator=random).tolist()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index, 1:].clone()
        labels[self.ends[index] :] = -100
        return {"input_ids": self.tokens[index, :-1], "labels": labels}


@pytest.fixture(scope="module")
def defined(tmp_path_factory: pytest.TempPathFactory) -> list[TrainingDefinition]:
    path = tmp_path_factory.mktemp("run") / "run.toml"
    path.write_text(TRAINED)
    run = load_run(path, BESIDE)
    return define_training(*deep_case(run))


LOOP, UPDATE, FILES = "weft.train.train_loop", "weft.engine.grad_update", "weft.checkpoint"
MUTANTS: dict[str, tuple[str, str, str, str, str]] = {
    # name: layout, module, function, old, new
    "the rate of the step before": (
        "dp2",
        LOOP,
        "TrainLoop.__call__",
        "factor(step - 1)",
        "factor(max(0, step - 2))",
    ),
    "a rate that is not set": ("dp2", LOOP, "TrainLoop.__call__", "rate * self.factor", "rate"),
    "warm-up from the base rate": (
        "dp2",
        "weft.train.lr_schedule",
        "lr_factor",
        "risen = (step + 1) / warmup",
        "risen = 1.0",
    ),
    "a schedule that ends at 0": (
        "dp2",
        "weft.train.lr_schedule",
        "lr_factor",
        "min_ratio + (1 - min_ratio) * falling",
        "falling",
    ),
    "a mean of validation batches": (
        "dp2",
        "weft.train.validation",
        "Validation.__call__",
        "* weights).sum() / weights.sum()",
        ").mean()",
    ),
    "other validation batches each time": (
        "dp2",
        "weft.train.data",
        "Loader.one_pass",
        "self.step = 0",
        "pass",
    ),
    "validation with dropout": (
        "dp2",
        "weft.engine.inference",
        "Inference._begin",
        "self.stages.model.eval()",
        "self.stages.model.train()",
    ),
    "validation of one rank's samples": (
        "dp2",
        "weft.engine.inference",
        "Inference.evaluate",
        "if group is not None:",
        "if False:",
    ),
    "validation of a part of the batch": (
        "pp2",
        "weft.engine.inference",
        "Inference.evaluate",
        "total.add_(",
        "total.copy_(",
    ),
    "gradients below the norm are scaled up": (
        "dp2",
        UPDATE,
        "GradUpdate.__call__",
        ", max=1.0)",
        ", max=1e9)",
    ),
    "clipped by the norm of a part": (
        "fsdp2",
        UPDATE,
        "GradUpdate._sum_over_ranks",
        "if plan.layout.world > 1:",
        "total[0] *= 2; world = plan.layout.world\n            if world > 1:",
    ),
    "a skipped step is taken": (
        "dp2",
        UPDATE,
        "GradUpdate.__call__",
        "if not finite or self._is_outlier(norm):",
        "if not finite or (self._is_outlier(norm) and False):",
    ),
    "norms forgotten by a checkpoint": (
        "dp2",
        UPDATE,
        "GradUpdate.load_scalars",
        'scalars.get("norms", ())',
        "()",
    ),
    "losses forgotten by a checkpoint": (
        "dp2",
        LOOP,
        "TrainLoop._save",
        "LOSSES: [*self.spikes.recent]",
        "LOSSES: []",
    ),
    "samples that are taken back come again": (
        "dp2",
        LOOP,
        "TrainLoop._go_back",
        "self.passed += step - kept",
        "pass",
    ),
    "a resumed run starts its data anew": (
        "dp2",
        LOOP,
        "TrainLoop.__call__",
        "step - 1 + self.passed",
        "step - self.first + self.passed",
    ),
    "warm-up that ends early, beyond the short run": (
        "dp2",
        "weft.train.lr_schedule",
        "lr_factor",
        "risen = (step + 1) / warmup",
        "risen = min(step + 1, 30) / warmup",
    ),
    "samples that are taken back, not in the checkpoint": (
        "dp2",
        LOOP,
        "TrainLoop._save",
        "LEFT_OUT: self.passed",
        "LEFT_OUT: 0",
    ),
    "samples that are taken back, not read from it": (
        "dp2",
        "weft.train.trainer",
        "_train",
        "passed=left_out,",
        "passed=0,",
    ),
    "optimizer state not loaded": (
        "fsdp2",
        f"{FILES}.engine_files",
        "fill_engine",
        "engine.tensors(saved)",
        '(p for p in engine.tensors(saved) if "exp_avg_sq" not in p.name)',
    ),
    "a part saved in another's place": (
        "fsdp2",
        f"{FILES}.reader",
        "CheckpointReader.fill",
        ".copy_(part)",
        ".copy_(part.flip(0) if part.ndim == 2 else part)",
    ),
}


OF_ROLLBACK = {"losses forgotten by a checkpoint", "samples that are taken back come again"}
OF_ROLLBACK |= {name for name in MUTANTS if "samples that are taken back," in name}


@pytest.mark.grid(2, ci=2)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_of_training_is_seen(
    defined: list[TrainingDefinition], tmp_path: Path, name: str
) -> None:
    layout, *mutant = MUTANTS[name]
    with mutated(Mutant(*mutant)):
        proofs = training_proofs(defined[name in OF_ROLLBACK], layout, tmp_path)
    wrong = [proof.shown for proof in proofs if not proof.equal]
    assert wrong
    assert not any("Error" in shown for shown in wrong), wrong


@pytest.mark.parametrize("layout", ["dp2", "pp2", "fsdp2"])
def test_all_of_it_happens(defined: list[TrainingDefinition], tmp_path: Path, layout: str) -> None:
    for number, each in enumerate(defined):
        here = tmp_path / str(number)
        proofs = training_proofs(each, layout, here)
        proofs += other_layout_proofs(each, layout, here, here / "whole")
        assert all(proof.equal for proof in proofs), proofs
        told = [proof.what for proof in proofs]
        assert told.count(f"resumed at {each.step}") == 3
        if each.trajectory.taken_back:
            assert f"resumed at {each.trajectory.back_at + each.step}" in told
        assert len(each.trajectory.validations) == 6
    with_skip, with_rollback = (each.trajectory.happened for each in defined)
    assert with_skip == {"clip", "skip"}
    assert with_rollback == {"clip", "rollback"}


class Few(Padded):
    """Validation samples of three batches, drawn as torch draws by default."""

    def __init__(self, split: str = "train"):
        super().__init__(split)
        if split == "val":
            random = torch.Generator().manual_seed(9)
            self.tokens = (torch.randn(13, 7, generator=random) * 8).long().abs() % 31

    def __len__(self) -> int:
        return len(self.tokens)


def test_a_short_validation_is_one_pass(tmp_path: Path) -> None:
    """Of data that torch draws, which are others in float64."""
    path = tmp_path / "run.toml"
    path.write_text(TRAINED.replace(":Padded", ":Few").replace("batches = 3", "batches = 8"))
    found, *_ = define_training(*deep_case(load_run(path)))
    proofs = training_proofs(found, "dp2", tmp_path)
    assert all(proof.equal for proof in proofs), proofs


def test_tied_weights_are_one(tmp_path: Path) -> None:
    """A checkpoint has them once."""
    path = tmp_path / "run.toml"
    path.write_text(TRAINED.replace("dropout = 0.1", "tied = true"))
    (found,) = define_training(*deep_case(load_run(path)))
    proofs = training_proofs(found, "dp2", tmp_path)
    assert all(proof.equal for proof in proofs), proofs


BY_SIGN = """
[model]
build = "tests.verification.test_rounding:FusedKeys"
[data]
build = "tests.verification.test_training_proof:Padded"
[layout]
axes = "dp2"
[train]
batch = 4
steps = 400
ema = 0.9
[optimizer]
name = "lion"
lr = 1e-2
"""


def of_signs(folder: Path) -> TrainingDefinition:
    path = folder / "run.toml"
    path.write_text(BY_SIGN)
    return define_training(*deep_case(load_run(path)))[0]


def test_signs_of_rounding_are_left_out(tmp_path: Path) -> None:
    proofs = training_proofs(of_signs(tmp_path), "dp2", tmp_path)
    assert all(proof.equal for proof in proofs), proofs
    told = "left out: blocks.0.qkv.bias (16 elements of rounding alone), "
    assert told in proofs[0].shown
    assert "ema/blocks.0.qkv.bias (16 elements" in proofs[0].shown


def test_beside_them_the_rest_is_not(tmp_path: Path) -> None:
    """Of the same bias, the elements that are no rounding."""
    old = "torch._foreach_add_(weights, steps, alpha=-lr)"
    new = f"{old}; [w[32:].mul_(1.0 + 1e-6) for w in weights if w.shape == (48,)]"
    with mutated(Mutant("weft.engine.lion", "_update", old, new)):
        proof = training_proofs(of_signs(tmp_path), "dp2", tmp_path)[0]
    assert not proof.equal and "left out: blocks.0.qkv.bias (16 elements" in proof.shown
    assert "first difference: loss of step" in proof.shown
