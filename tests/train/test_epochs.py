"""`train.epochs` in place of `train.steps`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.run_files import TINY
from weft.cli.app import app
from weft.core import run_config
from weft.core.errors import ConfigError, DataError, Refusal
from weft.train import build_data
from weft.train.trainer import train

SAMPLES = """
import torch

class Rows:
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        ids = (torch.arange(17) + index) % 256
        return {"input_ids": ids[:-1], "labels": ids[1:]}

class Endless:
    def __getitem__(self, index):
        return Rows(1)[index]

def endless():
    return Endless()
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """21 samples in batches of 8: an epoch is two steps."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "samples_of_epochs_test.py").write_text(SAMPLES)
    text = TINY.replace("max_bytes = 100000\n", "").replace("steps = 2", "epochs = 1.5")
    data = 'build = "samples_of_epochs_test:Rows"\ncount = 21'
    text = text.replace('build = "weft.data:stdlib"\nseq_len = 16', data)
    (tmp_path / "run.toml").write_text(text)
    return tmp_path / "run.toml"


@pytest.mark.parametrize(("epochs", "steps"), [("1", 2), ("1.5", 3), ("10", 20)])
def test_epochs_are_counted_in_full_batches(run_file: Path, epochs: str, steps: int) -> None:
    run = build_data.count_steps(run_config.load_run(run_file, {"train.epochs": epochs}))
    assert (run.train.steps, run.train.epochs) == (steps, None)
    assert build_data.count_steps(run) == run


def test_epochs_of_an_optimizer_of_the_users_own(run_file: Path) -> None:
    text = run_file.read_text()
    run_file.write_text(
        f'{text[: text.index("[optimizer]")]}[optimizer]\nbuild = "torch.optim:SGD"\n'
    )
    assert build_data.count_steps(run_config.load_run(run_file)).train.steps == 3


def test_a_run_ends_with_its_epochs(run_file: Path) -> None:
    """By the command, and from Python; the run folder then says how many steps that were."""
    planned = CliRunner().invoke(app, ["plan", str(run_file), "--cluster", "h100x1", "--json"])
    assert json.loads(planned.stdout)["steps"] == 3
    asked = run_config.load_run(run_file, {"train.log_every": "1"})
    train(asked, False)
    lines = [json.loads(line) for line in (Path(asked.output) / "metrics.jsonl").open()]
    assert [(line["step"], line["epoch"]) for line in lines] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    written = run_config.load_run(Path(asked.output) / "run.toml")
    assert (written.train.steps, written.train.epochs) == (3, None)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"train.steps": "3"}, "train.epochs = 1.5: is given beside steps. Leave one of them out"),
        ({"train.epochs": "0"}, "train.epochs = 0: must be greater than 0"),
        (
            {"train.warmup": "4"},
            "train.warmup = 4: is longer than the whole run. Use at most steps",
        ),
        ({"train.batch": "32"}, "train.epochs = 1.5: has no step: 21 samples are 0 batches of 32"),
        ({"data": '{ build = "samples_of_epochs_test:endless" }'}, "Endless, which has no __len__"),
    ],
)
def test_what_cannot_be_counted_is_refused(
    run_file: Path, settings: dict[str, str], says: str
) -> None:
    with pytest.raises(Refusal) as found:
        build_data.count_steps(run_config.load_run(run_file, settings))
    assert says in str(found.value) and isinstance(found.value, ConfigError | DataError)


def test_a_run_needs_one_of_both(run_file: Path) -> None:
    run_file.write_text(run_file.read_text().replace("epochs = 1.5\n", ""))
    with pytest.raises(ConfigError, match=r"train.steps = None: is missing. Write steps, as in 10"):
        run_config.load_run(run_file)
