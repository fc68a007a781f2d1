"""The plan that is checked before any process starts is the one by which ranks train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.run_files import TRAINED
from weft.core import Plan, RunConfig, load_run
from weft.train import build, build_data, check_run, run_checks

LAYOUTS = ["dp2", "fsdp2", "fsdp2+zero2.tp2+sequence", "ulysses2", "dp2.tp2"]


def of_layout(folder: Path, axes: str) -> RunConfig:
    path = folder / "run.toml"
    path.write_text(TRAINED.replace('"dp2"', f'"{axes}"'))
    return load_run(path)


def of_a_rank(run: RunConfig, checked: Plan | None, dtype: torch.dtype = torch.float32) -> Plan:
    sample = build_data.sample_batch(run, build_data.build_dataset(run))
    return build.build_for_ranks(run, sample, dtype, checked)[1]


@pytest.mark.parametrize("axes", LAYOUTS)
def test_ranks_take_it_as_they_would_make_it(tmp_path: Path, axes: str) -> None:
    run = of_layout(tmp_path, axes)
    (checked,) = check_run(run)
    assert of_a_rank(run, checked) is checked
    assert of_a_rank(run, None) == checked


def test_other_weights_are_planned_anew(tmp_path: Path) -> None:
    run = of_layout(tmp_path, "dp2")
    (checked,) = check_run(run)
    found = of_a_rank(run, checked, torch.float64)
    assert {weight.dtype for weight in found.weights} == {torch.float64}


def test_stages_are_cut_anew(tmp_path: Path) -> None:
    run = of_layout(tmp_path, "pp2")
    (checked,) = check_run(run)
    found = of_a_rank(run, checked)
    assert found is not checked and found == checked


def test_what_the_check_has_seen_is_not_looked_for_again_on_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = of_layout(tmp_path, "dp2")
    (checked,) = check_run(run)
    assert not checked.own_gradients
    # where a forward may call other functions than without weights
    monkeypatch.setattr(run_checks, "own_device", lambda: torch.device("cuda"))
    (checked,) = check_run(run)
    assert checked.own_gradients


CONSTANTS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.norm = nn.BatchNorm1d(8)  # which has a count of batches
        self.sizes = self.constants()
    def constants(self):
        return torch.tensor([3, 5])
    def forward(self, input_ids, **others):
        x = self.embedding(input_ids)
        noise = torch.randn(len(x), int(self.sizes[1]), 8)
        return self.head(x + noise[:, :1])

class WithoutConstants(Model):
    def constants(self):
        return [3, 5]
"""


@pytest.mark.parametrize("name", ["Model", "WithoutConstants"])
def test_a_model_with_constants_is_planned_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "model_with_constants.py").write_text(CONSTANTS)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "run.toml").write_text(f"""
[model]
build = "model_with_constants:{name}"
[data]
build = "tests.verification.test_training_proof:Padded"
[layout]
axes = "dp2"
[train]
batch = 4
steps = 1
""")
    run = load_run(tmp_path / "run.toml")
    (checked,) = check_run(run)
    found = of_a_rank(run, checked)
    assert found == of_a_rank(run, None)
    assert found.dropped.written == {(-1, 5, 8)}
    assert (found is checked) == (name == "WithoutConstants")
