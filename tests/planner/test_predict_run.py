"""What a run says of what was to be expected: on this machine's sheet, and never in the way of a
run that is done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.planner.test_search import cluster
from tests.train.test_trainer import RUN
from weft.core import run_config, toml
from weft.planner.cost import hardware
from weft.planner.cost.card_sheet import sheet_of_card
from weft.planner.predict_run import Prediction, predict

CPU = torch.device("cpu")
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this machine's sheet lies."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = hardware.local_sheet()
    path.parent.mkdir(parents=True)
    return path


def run(folder: Path, layout__axes: str = "dp2", **settings: str) -> run_config.RunConfig:
    path = folder / "run.toml"
    path.write_text(RUN)
    settings["layout__axes"] = layout__axes
    return run_config.load_run(
        path, {key.replace("__", "."): json.dumps(value) for key, value in settings.items()}
    )


def sheet(kind: str = "cpu", devices: int = 2) -> str:
    made = cluster(2).hardware
    tiers = (made.tiers[0].model_copy(update={"devices": devices}),)
    return toml.dump_toml(made.model_copy(update={"kind": kind, "tiers": tiers}))


def test_the_sheet_is_in_the_cache_that_the_user_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    assert hardware.local_sheet() == tmp_path / "mine" / "weft" / "hardware.toml"
    for none in ("", "relative"):  # which the specification has ignored
        monkeypatch.setenv("XDG_CACHE_HOME", none)
        assert hardware.local_sheet() == tmp_path / ".cache" / "weft" / "hardware.toml"


def test_what_was_to_be_expected(tmp_path: Path, at: Path) -> None:
    assert "weft calibrate" in str(predict(run(tmp_path), CPU))
    at.write_text(sheet())
    found = predict(run(tmp_path), CPU)
    assert (
        isinstance(found, Prediction)
        and found.step_s > 0
        and found.traffic["dp"] > 0
        and not found.bubble
    )
    at.write_text(sheet("cuda"))
    assert "weft calibrate" in str(predict(run(tmp_path), CPU)), "the sheet of another machine"


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-PCIE-80GB", "a100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GH200 144G HBM3e", "gh200-144"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce GTX 1080", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA H100 NVL", None),
    ],
)
def test_the_sheet_of_a_card(title: str, name: str | None) -> None:
    assert sheet_of_card(title) == name


@pytest.mark.parametrize(
    ("text", "axes", "said"),
    [
        ("name = ", "dp2", "is not TOML"),
        ("\x00", "dp2", "is not TOML"),
        ("name = 'x'", "dp2", "is missing"),
        (sheet(), "dp4", "its networks connect at most 2 devices"),
        (sheet(devices=0).replace("fp32", "fp16"), "dp2", "has no peak for it"),
    ],
)
def test_a_sheet_that_says_nothing_of_a_run_is_said(
    text: str, axes: str, said: str, tmp_path: Path, at: Path
) -> None:
    at.write_text(text)
    assert said in str(predict(run(tmp_path, layout__axes=axes), CPU))


def test_a_sheet_that_cannot_be_read(tmp_path: Path, at: Path) -> None:
    at.mkdir()
    assert "cannot be read" in str(predict(run(tmp_path), CPU))


def test_what_fails_in_a_runs_own_code_is_said(tmp_path: Path, at: Path) -> None:
    at.write_text(sheet())
    (tmp_path / "own.py").write_text("def data():\n    raise KeyError('gone')\n")
    assert "gone" in str(predict(run(tmp_path, data__build="own:data"), CPU))


def test_a_cut_of_single_layers_is_not_predicted(tmp_path: Path, at: Path) -> None:
    at.write_text(sheet())
    images = run_config.load_run(EXAMPLES / "images.toml", {"layout.axes": '"tp2"'})
    assert "single layers" in predict(images, CPU).why
