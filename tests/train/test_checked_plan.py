"""The plan that is checked before any process starts is the one by which ranks train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.run_files import TRAINED
from weft.core import Plan, RunConfig, load_run
from weft.train import build, build_data, check_run

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
