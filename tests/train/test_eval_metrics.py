"""Metrics of a validation: one device's numbers on every layout, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401 (named below as what is no function)
from torch import Tensor
from typer.testing import CliRunner

from tests.run_files import TINY
from tests.train.test_trainer import lines, make
from weft.cli.app import app
from weft.core.errors import NO_CODE, Refusal
from weft.core.run_config import RunConfig
from weft.launch.local_workers import Pool
from weft.losses import positionwise, whole_batch
from weft.train import build, run_checks
from weft.train.trainer import train

HERE = "tests.train.test_eval_metrics"


@positionwise
def accuracy(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of the labels that count; how many these are differs from sample to sample."""
    assert type(output) is Tensor and output.shape[-1] == 32  # whole logits, not a rank's part
    counts = batch["labels"] != -100
    return ((output.argmax(-1) == batch["labels"]) & counts).sum(), counts.sum()


@positionwise
def surprise(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The mean loss by a formula of its own, to be compared with `val_loss`."""
    counts = batch["labels"] != -100
    labels = batch["labels"].masked_fill(~counts, 0)
    chosen = output.double().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    return -(chosen * counts).sum(), counts.sum()


def samplewise(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return output.amax(dim=(1, 2)).sum(), len(output)


def mean(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return output.mean()


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return output.sum(), 1


@whole_batch
def of_all(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return output.sum(), 1


def nowhere(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return output.sum() * 0, 0


def measured(folder: Path, axes: str, *names: str, **settings: Any) -> RunConfig:
    settings = {"train__eval_every": 3, "train__eval_batches": 3} | settings
    named = [f"{HERE}:{name}" for name in names]
    return make(folder, axes, train__eval_metrics=named, **settings)


@pytest.mark.grid(3, ci=2)
@pytest.mark.parametrize(
    "axes", ["dp2", "fsdp2", "tp2", "tp2+sequence", "pp2", "cp2", "pp2.dp2", "vp2"]
)
def test_a_metric_is_that_of_one_device(tmp_path: Path, pool: Pool, axes: str) -> None:
    names = ("accuracy", "surprise") if axes == "cp2" else ("accuracy", "surprise", "samplewise")
    settings = {"precision__compute": "fp64", "train__logits": "chunks"}
    one = measured(tmp_path / "one", "dp1", *names, train__accumulate=2, **settings)
    train(one, False)
    many = measured(tmp_path / "many", axes, *names, train__accumulate=2, **settings)
    pool.run(train, many, False, world=many.world)
    wanted, found = ([line for line in lines(run) if "val_loss" in line] for run in (one, many))
    assert [line["step"] for line in found] == [3, 6]
    for one_device, there in zip(wanted, found, strict=True):
        assert there == pytest.approx(one_device, rel=1e-12)
        assert there["val_surprise"] == pytest.approx(there["val_loss"], rel=1e-9)
        assert 0 < there["val_accuracy"] < 1 and there.keys() >= {f"val_{name}" for name in names}


def test_a_mean_of_nothing_is_left_out(tmp_path: Path) -> None:
    run = measured(tmp_path, "dp1", "nowhere", "accuracy")
    train(run, False)
    for line in lines(run):
        if "val_loss" in line:
            assert line.keys() == {"step", "val_loss", "val_accuracy"}


@pytest.mark.parametrize(
    ("axes", "name", "settings", "says"),
    [
        ("dp1", "mean", {}, "returns one tensor of shape .*, not .sum, weight."),
        ("dp1", "accuracies", {}, "has no accuracies. Did you mean"),
        ("dp1", "torch", {}, "is of type module and cannot be called"),
        ("dp1", "positionwise", {}, "does not take .output, batch."),
        ("dp1", "loss", {}, "val_loss is another metric already"),
        ("dp1", "of_all", {}, "compares the samples of the whole batch"),
        (
            "cp2",
            "samplewise",
            {},
            "positions, and cp divides the positions. Mark it @weft.losses.positionwise",
        ),
        ("dp1", "accuracy", {"train__eval_every": 0}, "no step runs a validation"),
    ],
)
def test_what_is_no_metric_is_refused(
    tmp_path: Path, axes: str, name: str, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(Refusal, match=says) as caught:
        run_checks.check_run(measured(tmp_path, axes, name, **settings))
    assert caught.value.field == "train.eval_metrics"


def test_names_that_end_alike_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="val_accuracy is another metric already"):
        build.build_eval_metrics(measured(tmp_path, "dp1", "accuracy", "accuracy"))


@pytest.mark.parametrize("command", ["train", "verify"])
def test_a_run_file_of_others_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    for name in (NO_CODE, "PYTHONSAFEPATH"):
        monkeypatch.setenv(name, "")  # and is put back
    monkeypatch.chdir(tmp_path)
    (tmp_path / "touched.py").write_text("open('touched', 'w').close()")
    (tmp_path / "run.toml").write_text(TINY)
    named = json.dumps(["touched:accuracy"])
    given = ["run.toml", "--no-code", "--set", f"train.eval_metrics={named}"]
    result = CliRunner().invoke(app, [command, *given, "--set", "train.eval_every=1"])
    said = " ".join(result.output.split())
    assert result.exit_code == 2, said
    assert "train.eval_metrics = 'touched:accuracy': is code from outside weft" in said
    assert not (tmp_path / "touched").exists()
