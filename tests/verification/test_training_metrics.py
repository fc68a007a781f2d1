"""`weft verify --deep` sees numbers of metrics.jsonl that are wrong beside a right loss: metrics of
a validation, and what a run tells of its experts."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from tests.mutants import Mutant, mutated
from weft.core import load_run
from weft.losses import positionwise
from weft.verification.training_check import training_proofs
from weft.verification.training_definition import TrainingDefinition, define_training
from weft.verification.verify_run import deep_case

RUN = """
[model]
build = "weft.models:decoder"
vocab = 31
dim = 8
layers = 2
heads = 2
hidden = 16
seq_len = 6
experts = 4
active = 2
balance = 0.1
capacity = 0.75
[data]
build = "tests.verification.test_training_proof:Padded"
[layout]
axes = "dp2"
[train]
batch = 4
accumulate = 2
steps = 400
seed = 3
eval_every = 50
eval_batches = 3
eval_metrics = ["tests.verification.test_training_metrics:hits"]
[optimizer]
name = "adamw"
lr = 1e-2
"""


@positionwise
def hits(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of the labels that count; how many these are differs from sample to sample."""
    counts = batch["labels"] != -100
    return ((output.argmax(-1) == batch["labels"]) & counts).sum(), counts.sum()


@pytest.fixture(scope="module")
def defined(tmp_path_factory: pytest.TempPathFactory) -> TrainingDefinition:
    path = tmp_path_factory.mktemp("run") / "run.toml"
    path.write_text(RUN)
    return define_training(*deep_case(load_run(path)))[0]


LOAD, METRICS = "weft.engine.expert_load", "weft.train.expert_metrics"
MUTANTS: dict[str, tuple[str, str, str, str, str]] = {
    # name: module, function, old, new, what is named
    "a mean of means": (
        "weft.train.validation",
        "Validation.__call__",
        "mean = float(total / weight)",
        "mean = sum(float(r.metrics[name][0] / r.metrics[name][1]) for r in results) / 3",
        "val_hits of step 5",
    ),
    "of one microbatch": (
        "weft.engine.inference",
        "Inference.evaluate",
        "total.add_(torch.stack([found, *measure(metrics, output, micro)]))",
        "total.mul_(torch.tensor([[1.0], [0.0]])).add_("
        "torch.stack([found, *measure(metrics, output, micro)]))",
        "val_hits of step 5",
    ),
    "a metric that is not written": (
        "weft.train.validation",
        "Validation.__call__",
        "if math.isfinite(mean):",
        "if not math.isfinite(mean):",
        "val_hits of step 5: none",
    ),
    "tokens of one microbatch": (
        LOAD,
        "ExpertLoad._enter",
        "self._counts[experts.module] += found",
        "self._counts[experts.module] = found",
        "tokens of expert",
    ),
    "tokens of all steps": (LOAD, "ExpertLoad.take", "own.zero_()", "pass", "tokens of expert"),
    "choices that find room alone": (
        LOAD,
        "ExpertLoad._enter",
        "if asked is not None and",
        "if asked is None and",
        "tokens of expert",
    ),
    "dropped among those taken": (
        METRICS,
        "_dropped_share",
        "sum(sum(row[1:])",
        "sum(sum(row)",
        "dropped_share",
    ),
    "the busiest of those dropped": (
        METRICS,
        "_busiest",
        "(len(row) - 1)",
        "len(row)",
        "busiest_expert",
    ),
    "a loss of gates that is no mean": (
        METRICS,
        "ExpertMetrics.line",
        "loss / next(iter(copies.values())) / weight",
        "loss / next(iter(copies.values()))",
        "gate_loss",
    ),
}


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_metric_is_seen(defined: TrainingDefinition, tmp_path: Path, name: str) -> None:
    *mutant, says = MUTANTS[name]
    with mutated(Mutant(*mutant)):
        proofs = training_proofs(defined, "dp2", tmp_path)
    wrong = [proof.shown for proof in proofs if not proof.equal]
    assert f"first difference: {says}" in wrong[0]


@pytest.mark.parametrize("layout", ["dp2", "ep2", "tp2", "pp2"])
def test_right_ones_are_equal(defined: TrainingDefinition, tmp_path: Path, layout: str) -> None:
    proofs = training_proofs(defined, layout, tmp_path)
    assert all(proof.equal for proof in proofs), proofs
    shown = {proof.what: proof.shown for proof in proofs}
    assert shown["experts"].startswith("tokens of 8 in each step")
    assert shown["validated"] == "4 times, 3 batches each, val_hits"
