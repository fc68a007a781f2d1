"""weft.checkpoint.save and load, of an engine in a loop of one's own: the files of weft train."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import weft
from tests.run_files import TINY
from weft.cli.app import app
from weft.core.errors import CheckpointError
from weft.core.run_config import load_run
from weft.data import Loader, stdlib
from weft.losses import next_token
from weft.models import decoder
from weft.train.trainer import train

RUN = TINY.replace("steps = 2", "steps = 4\nlog_every = 1")


PARTS = {"embedding": "fsdp+tp", "*.mlp": "fsdp", "head": "tp", "norm": "whole"}


def engine_of(layout: str, parts: dict[str, str] | None = None, **options: Any) -> weft.Engine:
    torch.manual_seed(0)
    model = decoder(**{"dim": 16, "heads": 2, "layers": 1, "seq_len": 16, **options})
    plan = weft.plan(model, layout, batch=8, loss=next_token, parts=parts or {})
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    return weft.Engine(model, plan, optimizer=adamw, loss=next_token, device="cpu")


def two_steps(
    layout: str, folder: Path, resume: bool, parts: dict[str, str] | None = None
) -> list[float]:
    """The losses of two steps; before them what is saved is loaded, and after them it is saved."""
    engine = engine_of(layout, parts)
    scalars = weft.checkpoint.load(engine, folder) if resume else {"steps_done": 0}
    assert engine.steps_done == scalars["steps_done"] == 2 * resume
    part = {"data_rank": engine.data_rank, "data_size": engine.data_size}
    data = stdlib(seq_len=16, max_bytes=100_000)
    loader = Loader(data, 8, seed=0, **part, start=engine.steps_done)
    losses = [float(engine.step(next(loader)).loss) for _ in range(2)]
    weft.checkpoint.save(engine, folder)
    return losses


@pytest.mark.parametrize(
    ("first", "second"),
    [("dp1", "dp1"), ("fsdp2", "tp2"), ("fsdp2.tp2", "dp2"), ("tp2", "fsdp2.tp2")],
)
def test_what_an_engine_saves_any_layout_loads(
    pool: Any, tmp_path: Path, first: str, second: str
) -> None:
    expected = two_steps("dp1", tmp_path / "one", False)
    expected += two_steps("dp1", tmp_path / "one", True)
    losses: list[float] = []
    for layout, resume in ((first, False), (second, True)):
        world = weft.Layout.parse(layout).world
        parts = PARTS if layout == "fsdp2.tp2" else {}
        losses += pool.run(two_steps, layout, tmp_path / "two", resume, parts, world=world)[0]
    assert losses == pytest.approx(expected, rel=1e-5)
    shown = CliRunner().invoke(app, ["checkpoint", "show", str(tmp_path / "two"), "--json"])
    assert shown.exit_code == 0 and json.loads(shown.stdout)["steps"] == [2, 4]


def test_weft_train_and_a_loop_go_on_from_each_other(tmp_path: Path) -> None:
    def run(output: str, **settings: int) -> Any:
        (tmp_path / "run.toml").write_text(RUN)
        text = {f"train.{key}": str(value) for key, value in settings.items()}
        path = {"output": json.dumps(str(tmp_path / output)), "checkpoint.every": "2"}
        return load_run(tmp_path / "run.toml", {**text, **path})

    def curve(output: str) -> list[float]:
        lines = (tmp_path / output / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    train(run("whole"), False)
    train(run("other", steps=2), False)
    assert two_steps("dp1", tmp_path / "other", True) == pytest.approx(curve("whole")[2:])
    assert two_steps("dp1", tmp_path / "mine", False) == pytest.approx(curve("whole")[:2])
    train(run("mine"), True)
    assert curve("mine") == pytest.approx(curve("whole")[2:])
    with pytest.raises(CheckpointError, match=r"the steps here are 2, 4|no complete checkpoint"):
        weft.checkpoint.load(engine_of("dp1"), tmp_path / "mine", step=3)


def test_a_folder_without_a_complete_checkpoint_has_no_latest_step(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert weft.checkpoint.latest_step(folder) is None
    (folder / "step-000001").mkdir(parents=True)  # of a run that was killed in its first save
    assert weft.checkpoint.latest_step(folder) is None
    with pytest.raises(CheckpointError, match="no complete checkpoint is here"):
        weft.checkpoint.load(engine_of("dp1"), tmp_path)
    weft.checkpoint.save(engine_of("dp1"), tmp_path)
    assert weft.checkpoint.latest_step(folder) == 0


def test_an_engine_is_not_filled_by_halves(tmp_path: Path) -> None:
    weft.checkpoint.save(engine_of("dp1", layers=2), tmp_path)
    small = engine_of("dp1")
    before = {name: p.detach().clone() for name, p in small.params.items()}
    with pytest.raises(CheckpointError, match=r"blocks\.1\..*the model does not"):
        weft.checkpoint.load(small, tmp_path)
    weft.checkpoint.save(small, tmp_path / "small")
    with pytest.raises(CheckpointError, match=r"blocks\.1\..*is not in the checkpoint"):
        weft.checkpoint.load(engine_of("dp1", layers=2), tmp_path / "small")
    assert all(torch.equal(p, before[name]) for name, p in small.params.items())


def test_replicas_that_step_by_themselves_are_not_saved_as_one(pool: Any, tmp_path: Path) -> None:
    pool.run(refused, tmp_path, world=2)


def refused(folder: Path) -> None:
    model = decoder(dim=16, heads=2, layers=1, seq_len=16)
    sync = weft.sync.make_sync("local_sgd", period=2)
    plan = weft.plan(model, "dp2", batch=8, loss=next_token, sync=sync)
    sgd = partial(torch.optim.SGD, lr=1e-3)
    engine = weft.Engine(model, plan, optimizer=sgd, loss=next_token, device="cpu")
    with pytest.raises(CheckpointError, match=r"local_sgd.*different steps"):
        weft.checkpoint.save(engine, folder)
    assert not (folder / "checkpoints").exists()
