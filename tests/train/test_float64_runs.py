"""Runs in float64 of models whose inputs are floats, or whose parameters are complex: planned and
built in the dtype that they run in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.core import load_run
from weft.train import build, check_run

RUN = """
[model]
build = "tests.train.test_float64_runs:Filter"
[data]
build = "tests.train.test_float64_runs:Waves"
[train]
batch = 4
steps = 1
loss = "weft.losses:mse"
[precision]
compute = "fp64"
"""


class Filter(nn.Module):
    """A filter in frequency space, a convolution, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.cfloat))
        self.smooth = nn.Conv1d(1, 1, 3, padding=1)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=8)
        x = self.smooth(x[:, None])[:, 0]
        return self.second(torch.tanh(self.first(x)))


class Waves(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.arange(8.0) + index, "target": torch.zeros(8)}


@pytest.fixture
def run(tmp_path: Path) -> Any:
    (tmp_path / "run.toml").write_text(RUN)
    return load_run(tmp_path / "run.toml")


def test_stages_of_a_run_in_float64_are_planned(run: Any) -> None:
    assert check_run(run, ["pp2"])[0].staging is not None


@pytest.mark.parametrize("make", [build.build_model, build.build_deferred])
def test_complex_parameters_are_as_wide_as_the_others(run: Any, make: Any) -> None:
    model = make(run, dtype=torch.float64)
    assert model.filter.dtype == torch.complex128
    assert model.first.weight.dtype == torch.float64
