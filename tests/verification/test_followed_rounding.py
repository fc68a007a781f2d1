"""Of a weight whose gradient is rounding alone, an optimizer that takes signs makes full steps;
`weft verify --deep` still compares the buffers that do not follow it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.mutants import Mutant, mutated
from weft.core import load_run
from weft.verification.training_check import training_proofs
from weft.verification.training_definition import TrainingDefinition, define_training
from weft.verification.verify_run import deep_case

RUN = """
[model]
build = "tests.verification.test_followed_rounding:Normed"
[data]
build = "tests.verification.test_followed_rounding:Vectors"
[layout]
axes = "dp2"
[train]
batch = 8
steps = 400
seed = 3
loss = "tests.verification.test_followed_rounding:loss"
[optimizer]
name = "lion"
lr = 1e-2
"""


class Vectors:
    def __init__(self, split: str = "train"):
        random = np.random.default_rng(3)
        self.x = torch.from_numpy(random.standard_normal((48, 6)).astype("float32"))
        self.y = torch.from_numpy(random.integers(0, 3, 48))

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class Normed(nn.Module):
    """The bias of `a` has no effect on the loss, and the running mean follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.b = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(torch.tanh(self.norm(self.a(x))))
        return found


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    each = F.cross_entropy(output, batch["y"], reduction="sum")
    return each, torch.tensor(float(len(batch["y"])))


@pytest.fixture(scope="module")
def defined(tmp_path_factory: pytest.TempPathFactory) -> TrainingDefinition:
    path = tmp_path_factory.mktemp("run") / "run.toml"
    path.write_text(RUN)
    (found,) = define_training(*deep_case(load_run(path)), "dp2")
    return found


def test_what_is_left_out_is_named(defined: TrainingDefinition, tmp_path: Path) -> None:
    proofs = training_proofs(defined, "dp2", tmp_path)
    assert all(proof.equal for proof in proofs), proofs
    assert "left out: a.bias (8 elements of rounding alone)" in proofs[0].shown
    assert "running_var" not in proofs[0].shown


def test_a_buffer_that_is_wrong_is_seen(defined: TrainingDefinition, tmp_path: Path) -> None:
    old = "(count > 0).to(kept.dtype) * rate)"
    with mutated(Mutant("weft.nn.batchnorm", "BatchNorm._track", old, f"{old[:-1]} * 0.5)")):
        proof = training_proofs(defined, "dp2", tmp_path)[0]
    assert not proof.equal and "first difference: norm.running_" in proof.shown, proof
