"""A step fails while a checkpoint is being written: the checkpoint is finished, and is resumed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.train.test_trainer import make, saved
from weft import checkpoint
from weft.checkpoint import writer
from weft.core.errors import WorkerDied
from weft.core.run_config import RunConfig
from weft.core.shards import whole_shard
from weft.engine import Engine
from weft.train.trainer import train

WRITES_S = 1.0  # a rank, its files


def fails(run: RunConfig, who: int) -> None:
    """Trains; the step after the save of step 2 fails on this rank, while files are written."""
    write, step = writer.write_shards, Engine.step

    def slow(*args: Any) -> Any:
        time.sleep(WRITES_S)
        return write(*args)

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.steps_done == 2 and dist.get_rank() == who:
            raise RuntimeError("this step fails")
        return step(self, *args, **kwargs)

    writer.write_shards, Engine.step = slow, failing  # in a process of its own
    train(run, False)


@pytest.mark.parametrize("who", [0, 1])
def test_it_is_complete_and_resumed(tmp_path: Path, pool: Any, who: int) -> None:
    settings = {"checkpoint__every": 2}
    run = make(tmp_path, "fsdp2", **settings)
    with pytest.raises(WorkerDied, match="this step fails"):
        weft.launch(fails, run, who, layout="fsdp2", device="cpu")
    folder = Path(run.output) / "checkpoints"
    assert checkpoint.latest_step(folder) == 2
    pool.run(train, run, True, world=2)
    alone = make(tmp_path / "alone", "fsdp2", **settings)
    pool.run(train, alone, False, world=2)
    mine, wanted = saved(run, 6), saved(alone, 6)
    assert mine.keys() == wanted.keys()
    assert all(torch.equal(mine[name], wanted[name]) for name in wanted)


def test_a_save_that_stands_still_is_not_waited_for(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(writer, "write_shards", lambda *args: time.sleep(60))
    saver = checkpoint.AsyncCheckpointer()
    saver.save(tmp_path, 1, [whole_shard("w", torch.ones(2))], {}, {}, checkpoint.Retention())
    began = time.monotonic()
    assert not saver.finish(0.2)
    assert time.monotonic() - began < 30
