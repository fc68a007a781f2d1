"""Mistakes of a working day, made on the command line: each ends with one line that names what is
wrong and what would work, and nothing is lost.

Others are tested where they belong: fields and files in tests/cli/test_refusals.py, chat templates
in test_conversations.py, adapters of another base in test_adapter.py, trackers that do not answer
in test_loggers.py, metrics in test_eval_metrics.py, epochs of data without an end in
test_epochs.py, two runs in one folder in test_run_lock.py.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from torch import Tensor, nn
from typer.testing import CliRunner

from tests.run_files import TINY
from weft.callbacks import WatchedRun
from weft.checkpoint import latest_step
from weft.cli.app import app
from weft.data import Loader

HERE = "tests.train.test_daily_mistakes"
ROWS = f"""
[model]
build = "{HERE}:classifier"
[data]
build = "{HERE}:Rows"
[train]
batch = 8
steps = 4
threads = 1
loss = "weft.losses:classification"
[optimizer]
lr = 0.1
[checkpoint]
every = 2
"""
TEXT = TINY.replace('build = "weft.data:stdlib"\n', "SOURCE\n").replace("max_bytes = 100000\n", "")


class Rows:
    """Samples of two classes; that of number `odd` has the class `label`."""

    def __init__(
        self,
        key: str = "label",
        odd: int = -1,
        label: int = 7,
        size: int = 64,
        val_size: int = 64,
        split: str = "train",
    ):
        self.key, self.odd, self.label = key, odd, label
        self.size = size if split == "train" else val_size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        label = self.label if index == self.odd else index % 2
        return {"input": torch.full((3,), index / 64), self.key: torch.tensor(label)}


def classifier() -> nn.Module:
    return nn.Linear(3, 2)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


class FullDisk:
    """After a step no file of more than a few bytes can be written any more."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, run: WatchedRun, result: Any, metrics: Any) -> None:
        if run.step == self.step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with run files and data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "rows.toml").write_text(ROWS)
    for name, source in (
        ("text", 'text = ["empty.txt"]'),
        ("stream", 'stream = ["latin.txt"]'),
        ("chat", 'chat = ["chat.jsonl"]\ntokenizer = "nowhere"'),
        ("saved", 'hf = "saved"'),
    ):
        (tmp_path / f"{name}.toml").write_text(TEXT.replace("SOURCE", source))
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("été ".encode("latin-1") * 100)
    (tmp_path / "chat.jsonl").write_text('{"messages": []}\n')
    for name in ("model", "saved"):
        (tmp_path / name).mkdir()
    return tmp_path


def weft_(text: str) -> Result:
    return CliRunner().invoke(app, text.split())


def steps_saved(folder: Path) -> int | None:
    return latest_step(folder / "out" / "checkpoints")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            "rows.toml --set data.key=target",
            "loss = 'classification': reads the entry 'labels' of a sample, and the sample has"
            " only input, target. Rename the entry to 'labels'",
        ),
        (
            f"rows.toml --set data.key=target --set train.loss={HERE}:own_loss",
            "loss = 'own_loss': reads the entry 'class' of a sample, and the sample has"
            " only input, target.",
        ),
        ("rows.toml --set data.size=0", "data = 'Rows': has no sample. Use a dataset with samples"),
        (
            "rows.toml --set train.eval_every=2 --set data.val_size=0",
            "train.batch = 8: the split 'val' has 0 samples, fewer than one batch.",
        ),
        ("rows.toml --set train.batch=-8", "train.batch = -8: must be greater than 0."),
        ("rows.toml --set train.batch=eight", "train.batch = 'eight': is not a whole number."),
        (
            f'rows.toml --set train.callbacks=["{HERE}:FulDisk"]',
            f"train.callbacks = '{HERE}:FulDisk': {HERE} has no FulDisk. Did you mean \"FullDisk\"",
        ),
        (
            'rows.toml --set train.callbacks=["weft.callback:EarlyStopping"]',
            'there is no module weft.callback. Did you mean "callbacks"?',
        ),
        (
            'rows.toml --set train.callbacks=[{name="weft.callbacks:EarlyStopping",mode="least"}]',
            'train.callbacks.mode = \'least\': is not known. Write "min" or "max".',
        ),
        ("text.toml", "holds 0 tokens, and one sample takes 17. Give more text or a smaller"),
        (
            "stream.toml",
            "latin.txt']: cannot be read ('utf-8' codec can't decode byte 0xe9 in position 0:",
        ),
        ("chat.toml", "Name a model directory that holds its tokenizer: data.tokenizer."),
        (
            "model",
            "run file = 'model': cannot be read (Is a directory). Name a TOML file, in UTF-8.",
        ),
        ("latin.txt", "run file = 'latin.txt': cannot be read ('utf-8' codec can't decode"),
    ],
)
def test_what_is_refused_before_any_process_starts(
    args: str, says: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.cli.train_run.run_workers", lambda *_, **__: pytest.fail("started"))
    result = weft_(f"train {args} --output out")
    assert result.exit_code == 2, result.output
    [line] = result.stderr.splitlines()
    assert line.startswith("weft: ") and says in line, line
    assert not (folder / "out").exists()


def own_loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return output.sum() * batch["class"].sum(), torch.tensor(1.0)


@pytest.mark.parametrize(
    ("package", "args", "extra"),
    [
        ("transformers", 'rows.toml --set model={hf="model"}', "hf"),
        ("datasets", "saved.toml", "hf"),
        ("datasets", 'text.toml --set data={stream=["empty.txt"],seq_len=16}', "hf"),
        ("peft", "rows.toml --set model.adapter={r=4}", "peft"),
        ("tensorboard", 'rows.toml --set train.loggers=["tensorboard"]', "tensorboard"),
        ("wandb", 'rows.toml --set train.loggers=["wandb"]', "wandb"),
        ("mlflow", 'rows.toml --set train.loggers=[{name="mlflow",uri="http://a"}]', "mlflow"),
    ],
)
def test_a_missing_extra_is_named(
    package: str, args: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*sys.modules]:
        if name.startswith(f"{package}."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    result = weft_(f"train {args} --output out")
    assert result.exit_code == 2, result.output
    [line] = result.stderr.splitlines()
    assert f"needs the package {package}" in line and f'pip install "weft[{extra}]"' in line


# ---- what is known only while a run trains -------------------------------------------------------


@pytest.mark.parametrize("layout", ["dp1", "dp2"])
@pytest.mark.parametrize("step", [1, 4])
def test_a_label_that_is_no_class(step: int, layout: str, folder: Path) -> None:
    odd = Loader(Rows(), batch=8, seed=0).indices(step - 1)[0]
    result = weft_(f"train rows.toml --layout {layout} --output out --set data.odd={odd}")
    assert result.exit_code == 2, result.output
    line = result.stderr.splitlines()[-1]
    assert (
        "label = 7: is not one of the 2 classes of the logits, which are numbered from 0. Correct"
    ) in line
    assert "Traceback" not in result.output


def test_a_full_disk(folder: Path) -> None:
    full = json.dumps([{"name": f"{HERE}:FullDisk", "step": 3}]).replace('":', '"=')
    full = full.replace('"name"', "name").replace('"step"', "step").replace(" ", "")
    told = "rows.toml --output out --set train.steps=6 --set checkpoint.every=1"
    result = weft_(f"train {told} --set train.callbacks={full}")
    assert result.exit_code == 2, result.output
    assert "File too large" in result.stderr and "Traceback" not in result.output
    assert len(result.stderr.splitlines()) <= 2
    assert steps_saved(folder) in (1, 2)  # that of step 2 may still be being written
    again = weft_(f"train {told} --resume")
    assert again.exit_code == 0, again.output
    assert steps_saved(folder) == 6


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("data.size=32", "data = '32 samples': has 32 samples, and had 64 when the run was saved."),
        (f"model.build={HERE}:two_layers", "the checkpoint has it and 1 others, and the model"),
    ],
)
def test_a_run_goes_on_with_its_own_data_and_model(
    change: str, says: str, folder: Path, finished: Callable[[], None]
) -> None:
    finished()
    result = weft_(f"train rows.toml --output out --resume --set train.steps=6 --set {change}")
    assert result.exit_code == 2, result.output
    [line] = result.stderr.splitlines()
    assert says in line and ("Resume with the same data" in line or "begin another run" in line)
    assert steps_saved(folder) == 4


@pytest.fixture
def finished(folder: Path) -> Callable[[], None]:
    def run() -> None:
        result = weft_("train rows.toml --output out")
        assert result.exit_code == 0, result.output

    return run
