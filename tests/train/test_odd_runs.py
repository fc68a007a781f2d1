"""Runs that look like faults of the user's code, and train: no check refuses them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from weft.core import ConfigError, load_run
from weft.train import check_run

HERE = "mine_of_odd_runs_test"
MINE = """
import torch
import torch.nn.functional as F
from torch import nn

class Rows:
    def __init__(self, dtype="float32"):
        self.dtype = getattr(torch, dtype)
    def __len__(self):
        return 64
    def __getitem__(self, i):
        x = torch.full((3,), i % 5).to(self.dtype)
        return {"input": x, "labels": torch.tensor(i % 2), "counts": torch.tensor(i >= 2)}

class Net(nn.Module):
    def __init__(self, norm=False, floats=True):
        super().__init__()
        self.inner, self.head, self.floats = nn.Linear(3, 4), nn.Linear(4, 2), floats
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
    def forward(self, input):
        x = input.float() if self.floats else input
        return self.head(self.norm(self.inner(x)))

def some(output, batch):
    if not batch["counts"].any():
        return torch.zeros(()), len(output)
    losses = F.cross_entropy(output, batch["labels"], reduction="none")
    return (losses * batch["counts"]).sum(), len(output)

def some_of_output(output, batch):
    if not batch["counts"].any():
        return output.new_zeros(()), len(output)
    return some(output, batch)

def detached(output, batch):
    return F.cross_entropy(output.detach(), batch["labels"], reduction="sum"), len(output)

def nearest(output, batch):
    distances = torch.cdist(output, output)
    return distances.topk(2, largest=False).values.sum(), len(output)
nearest.whole_batch = True

class HeadAlone(torch.optim.AdamW):
    updates_each = "element"
    def __init__(self, named, lr):
        params = [p for name, p in named if name.startswith("head")]
        super().__init__([{"params": params}], lr=lr)

class Prints:
    def __init__(self, run):
        self.run = run
    def on_step_end(self, run, result, metrics):
        print(self.run)

def prints(run):
    return Prints(run)
"""
RUN = f"""
[model]
build = "{HERE}:Net"
[data]
build = "{HERE}:Rows"
[train]
batch = 8
steps = 2
loss = "weft.losses:classification"
[optimizer]
lr = 0.1
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, HERE, raising=False)
    (tmp_path / f"{HERE}.py").write_text(MINE)
    (tmp_path / "run.toml").write_text(RUN)


def check(settings: str) -> None:
    check_run(load_run("run.toml", dict(each.split("=", 1) for each in settings.split())))


@pytest.mark.parametrize(
    "settings",
    [
        # one sample on a rank, and two in the batch of a batch norm
        "model.norm=true data.dtype=uint8 layout.axes=dp2 train.batch=2",
        # one sample in a microbatch, and two in a loss of the whole batch
        f"train.loss={HERE}:nearest data.dtype=uint8 train.accumulate=8",
        # ranks cast what they are given
        "model.floats=false data.dtype=bfloat16 precision.compute=bf16",
        "model.floats=false data.dtype=float16 precision.compute=fp16",
        "model.floats=false data.dtype=float64 precision.compute=bf16",
        # of the first two samples none counts
        f"train.loss={HERE}:some",
        f"train.loss={HERE}:some_of_output",
        f"optimizer.build={HERE}:HeadAlone",
        f'train.callbacks=[{{name="{HERE}:prints",run="first"}}]',
    ],
)
def test_what_trains_is_not_refused(settings: str) -> None:
    check(settings)


def test_a_loss_of_a_detached_output_is_refused() -> None:
    with pytest.raises(ConfigError, match="loss = 'detached': its sum has no gradient"):
        check(f"train.loss={HERE}:detached")
