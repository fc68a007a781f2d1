"""Code of the user's that fails, or that trains nothing without a word: a run names its key, its
file and its line, before any process starts where that is possible."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from weft.checkpoint import latest_step
from weft.cli.app import app
from weft.core import told_fault

MINE = """
import sys, time, torch
from torch import nn
import torch.nn.functional as F

class Rows:
    def __init__(self, what="", at=20):
        self.what, self.at = what, at
    def __len__(self):
        return "64" if self.what == "length" else 64
    def __getitem__(self, i):
        x, y = torch.full((3,), i / 64), torch.tensor(i % 2)
        if self.what == "double":
            x = x.double()
        if self.what == "whole":
            x = torch.tensor([i, 1, 2])
        if self.what == "one-hot":
            y = F.one_hot(y, 2)
        if self.what == "sparse":
            x = x.to_sparse()
        if i == self.at and self.what == "raise":
            raise KeyError("no such row")
        if i == self.at and self.what == "none":
            return None
        return {"input": x, "labels": y}

def rows(fail):
    for i in range(99):
        if i == fail:
            raise RuntimeError("shard 3 is torn")
        yield {"input": torch.full((3,), i / 64), "labels": torch.tensor(i % 2)}

class Net(nn.Module):
    def __init__(self, what=""):
        super().__init__()
        self.inner, self.what = nn.Linear(3, 2), what
        if what == "misspelt":
            self.inner.absent.zero_()
        if what == "file":
            open("weights.pt")
    def forward(self, input):
        y = self.inner(input)
        if self.what == "detach":
            y = y.detach()
        if self.what == "name":
            return unknown(y)
        if self.what == "none":
            return None
        if self.what == "pair":
            return y, y
        return y

def net():
    return Net()

class OwnLoss(Net):
    def forward(self, input, labels=None):
        y = self.inner(input)
        return None if labels is None else F.cross_entropy(y, labels, reduction="none")

def own_losses(output, batch):
    return output.sum(), torch.tensor(float(len(output)))

def wrapped():
    return nn.DataParallel(Net())

def on_meta():
    with torch.device("meta"):
        return Net()

class NoForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2)

def item(output, batch):
    total = F.cross_entropy(output, batch["labels"], reduction="sum")
    return torch.tensor(total.item()), len(output)

def negative(output, batch):
    return F.cross_entropy(output, batch["labels"], reduction="sum"), -len(output)

class Other(torch.optim.SGD):
    def __init__(self, parameters, lr):
        super().__init__(nn.Linear(3, 2).parameters(), lr=lr)

class Arguments:
    def on_step_end(self, run):
        pass

class Exits:
    def on_step_end(self, run, result, metrics):
        if run.step == 3:
            sys.exit(0)

class Sleeps:
    def on_step_end(self, run, result, metrics):
        if run.step == 2:
            time.sleep(600)

def called(run):
    pass

def falls_off(steps):
    return lambda step: [1.0, 1.0][step]
"""

RUN = """
[model]
build = "mine_of_faults_test:Net"
[data]
build = "mine_of_faults_test:Rows"
[train]
batch = 8
steps = 6
threads = 1
loss = "weft.losses:classification"
loggers = []
[optimizer]
lr = 0.1
[checkpoint]
every = 2
"""
HERE = "mine_of_faults_test"


def line(text: str) -> str:
    """Where this stands in the user's file, as messages say it."""
    [number] = [n for n, row in enumerate(MINE.splitlines(), 1) if text in row]
    return f"({HERE}.py, line {number}, in "


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / f"{HERE}.py").write_text(MINE)
    (tmp_path / "exits_of_faults_test.py").write_text('import sys\nsys.exit("set DATA first")\n')
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.delitem(sys.modules, HERE, raising=False)
    return tmp_path


def weft_(*args: str) -> Result:
    return CliRunner().invoke(app, ["train", "run.toml", "--output", "out", *args])


def test_labels_that_a_model_is_not_called_with_are_named(folder: Path) -> None:
    own = "--set", f'train.loss="{HERE}:own_losses"', "--set", f'model.build="{HERE}:OwnLoss"'
    result = weft_(*own)
    fix = 'model.inputs = ["input", "labels"]'
    assert f"called without labels, and to pass them, write {fix}." in result.stderr
    result = weft_(*own, "--set", fix.replace(" ", ""))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ('model.what="misspelt"', f"no attribute 'absent' {line('absent.zero_')}__init__)"),
        ('model.what="file"', f"No such file or directory: 'weights.pt' {line('weights.pt')}"),
        ('model.build="exits_of_faults_test:net"', "SystemExit: set DATA first (exits_of_faults"),
        ('model.build="./mine_of_faults_test.py:net"', f'Write "{HERE}:net"; modules are found'),
        (f'model.build="{HERE}:NoForward"', "model = 'NoForward': its forward fails: TypeError"),
        (f'model.build="{HERE}:wrapped"', "returns a DataParallel, and the layout says how"),
        ('model.what="name"', f"name 'unknown' is not defined {line('unknown(y)')}forward)"),
        ('model.what="none"', "the model returns NoneType, and the loss needs logits. Let"),
        ('model.what="pair"', "the model returns (one tensor of shape [2, 2], one tensor of"),
        ('model.what="detach"', "loss = 'classification': its sum has no gradient, so no weight"),
        ('data.what="length"', "data = 'Rows': its __len__ fails: TypeError: 'str' object"),
        (
            'data={ build = "mine_of_faults_test:Rows", what = "raise", at = 0 }',
            "data = 'Rows': sa",
        ),
        ('data={ build = "mine_of_faults_test:rows", fail = 1 }', "shard 3 is torn (mine_of_faul"),
        ('data.what="double"', "in forward). Correct it, or the data: input float64 [8, 3]"),
        ('data.what="whole"', "in forward). Correct it, or the data: input int64 [8, 3], labels"),
        ('data.what="one-hot"', "train.loss = 'classification': fails on the model's output: Runt"),
        ('data.what="sparse"', "data = 'input': an entry of a sample is a sparse tensor"),
        (f'train.loss="{HERE}:negative"', "loss = 'negative': returns the weight -2, which is neg"),
        (f'train.callbacks=["{HERE}:Arguments"]', "Arguments.on_step_end does not take (self, run"),
        (f'train.loggers=["{HERE}:Exits"]', "Name a logger of your own in train.callbacks."),
        (f'train.callbacks=["{HERE}:called"]', "is a function of the run, and not a class of call"),
        (f'optimizer.build="{HERE}:Other"', "it has none of the parameters that it is called with"),
        ('optimizer.lr="0.1"', "optimizer.lr = '0.1': is not a number. Write as in 0.001"),
        (f'lr_schedule.build="{HERE}:falls_off"', "its function fails at step 2: IndexError"),
        ("train.callbacks=[mine:Arguments]", "--set = 'train.callbacks=[mine:Arguments]': is not"),
    ],
)
def test_what_is_refused_before_any_process_starts(
    setting: str, says: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.cli.train_run.run_workers", lambda *_, **__: pytest.fail("started"))
    result = weft_("--set", setting)
    assert result.exit_code == 2, result.output
    [said] = result.stderr.splitlines()
    assert said.startswith("weft: ") and says in said, said
    assert not (folder / "out").exists()


def test_a_sample_that_cannot_be_read_is_named_with_its_line(folder: Path) -> None:
    result = weft_("--set", 'data.what="raise"', "--set", "checkpoint.restarts=0")
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    where = line('KeyError("no such row")')
    told = f"KeyError: 'no such row', sample 20 of the data was being read {where}__getitem__)"
    assert f"rank 0 died: {told}. The traceback is in out/traceback.txt" in result.stderr
    assert 'raise KeyError("no such row")' in (folder / "out" / "traceback.txt").read_text()


def test_a_sample_that_is_none(folder: Path) -> None:
    result = weft_("--set", 'data.what="none"')
    assert result.exit_code == 2, result.output
    assert "data = 'a sample': is of type NoneType, and others are dicts" in result.stderr


def test_a_loss_without_gradient_that_only_a_rank_can_run(folder: Path) -> None:
    result = weft_("--set", f'train.loss="{HERE}:item"')
    assert result.exit_code == 2, result.output
    assert "loss = 'item': its sum has no gradient" in result.stderr.splitlines()[-1]


def test_a_callback_that_exits_loses_nothing(folder: Path) -> None:
    result = weft_("--set", f'train.callbacks=["{HERE}:Exits"]')
    assert result.exit_code == 1, result.output
    assert "Exits: on_step_end failed on rank 0, after step 3: SystemExit: 0" in result.stderr
    assert latest_step(folder / "out" / "checkpoints") == 4  # the next one that is saved


def test_one_rank_alone_hangs_where_a_limit_is_set(folder: Path) -> None:
    told = ["run.toml", "--output", "out", "--set", f'train.callbacks=["{HERE}:Sleeps"]']
    told += ["--set", "train.hang_s=0.5", "--set", "checkpoint.restarts=0"]
    command = [sys.executable, "-m", "weft", "train", *told]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 1, ended.stderr
    assert f"{HERE}.py:" in ended.stderr and "in on_step_end" in ended.stderr


def test_a_model_without_elements(folder: Path) -> None:
    result = weft_("--set", f'model.build="{HERE}:on_meta"')
    assert result.exit_code == 2, result.output
    [said] = result.stderr.splitlines()
    assert "inner.weight is on the meta device, and has no elements. Build it" in said


def test_what_a_process_of_a_data_loader_raised() -> None:
    text = """Caught KeyError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/home/me/rows.py", line 14, in __getitem__
    raise KeyError("no such row")
KeyError: 'no such row'
"""
    assert told_fault(KeyError(text)) == (
        "KeyError: 'no such row' (/home/me/rows.py, line 14, in __getitem__)"
    )


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("threads = 1", "sync_batchnorm = True", "Write sync_batchnorm = true."),
        ("threads = 1", "clip = None", "line 9 is not TOML (Invalid value): clip = None. Leave"),
        ('"weft.losses:classification"', "weft.losses:c", 'loss = "weft.losses:c".'),
        ('"weft.losses:classification"', "“weft.losses:c”", "Use straight quotes."),
        ("[train]", "train:", "Write a table as [model], and a key as dim = 64."),
        ("threads = 1", "batch = 4", "Write each key once."),
        ("[optimizer]", "[train]", "Write each table once, with all of its keys."),
    ],
)
def test_slips_of_toml(folder: Path, old: str, new: str, says: str) -> None:
    (folder / "run.toml").write_text(RUN.replace(old, new), encoding="utf-8")
    result = weft_()
    assert result.exit_code == 2, result.output
    [said] = result.stderr.splitlines()
    assert says in said, said


def test_a_mark_at_the_beginning_of_the_run_file(folder: Path) -> None:
    (folder / "run.toml").write_text(RUN, encoding="utf-8-sig")
    result = weft_("--set", "train.batch=-1")
    assert "train.batch = -1: must be greater than 0" in result.stderr
