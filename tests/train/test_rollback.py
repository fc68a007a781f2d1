"""Losses that are not gone on from: the run goes back to its checkpoint, and past the samples."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.train.test_trainer import Ramps, lines, make, saved
from weft.core.errors import ConfigError, WeftError
from weft.core.run_config import RunConfig
from weft.launch import local_workers
from weft.launch.local_workers import Pool
from weft.train import run_checks
from weft.train.trainer import train

BATCH, SIZE, BAD, KEPT = (
    8,
    1024,
    30,
    24,
)  # step 30 has the spike; 24 is that of the checkpoint before it
ORDER = np.random.default_rng([0, 0]).permutation(SIZE)
PLACE = np.argsort(ORDER)


class Spoilt(Ramps):
    """Whose sequences at these places in the order of seed 0 are noise."""

    def __init__(
        self, split: str = "train", first: int = BATCH * (BAD - 1), last: int = BATCH * BAD
    ):
        super().__init__(split, SIZE)
        self.first, self.last = first, last

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        found = super().__getitem__(index)
        if self.first <= PLACE[index] < self.last:
            found["labels"] = torch.full_like(found["labels"], index % 3)
        return found


class Passed(Ramps):
    """The same without the noise, as it is seen by one who leaves out the steps from the checkpoint
    to the spike."""

    def __init__(self, split: str = "train"):
        super().__init__(split, SIZE)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        place = PLACE[index]
        return super().__getitem__(
            int(ORDER[(place + BATCH * (BAD - KEPT)) % SIZE if place >= BATCH * KEPT else place])
        )


def settings(**more: Any) -> dict[str, Any]:
    common = {
        "train__steps": 40,
        "train__batch": BATCH,
        "train__seed": 0,
        "train__decay": "constant",
    }
    return {
        **common,
        "checkpoint__every": 8,
        "checkpoint__keep": 9,
        "data__build": "tests.train.test_rollback:Spoilt",
        **more,
    }


@pytest.mark.grid(1, ci=1)
@pytest.mark.parametrize("axes", ["dp1", "fsdp2", "pp2", "a worker"])
def test_a_spike_is_undone_and_its_samples_left_out(
    tmp_path: Path, pool: Pool, capfd: pytest.CaptureFixture[str], axes: str
) -> None:
    lies = "dp1" if axes == "a worker" else axes

    def trained(run: RunConfig, resume: bool) -> None:
        if axes == "a worker":
            local_workers.run_workers(
                train,
                2,
                run.model_copy(update={"workers": {"other": ("blocks.0",)}}),
                resume,
                threads=1,
            )
        else:
            train(run, resume) if axes == "dp1" else pool.run(train, run, resume, world=2)

    for steps in (KEPT, 36):  # begun again just before the spike, it still knows what is usual
        run = make(tmp_path, lies, **settings(train__rollback=1.5, train__steps=steps))
        trained(run, steps == 36)
    said = " ".join(capfd.readouterr().out.split())
    back = rf"where 1\.\d+ is usual: back to step {KEPT}, {BAD - KEPT} batches are left out"
    assert axes != "dp1" or re.search(back, said)
    run = make(tmp_path, lies, **settings(train__rollback=1.5))
    trained(run, True)  # how many are left out is in the checkpoint
    assert [line["step"] for line in lines(run)] == list(range(1, 41))
    assert [line.get("batches_left_out", 0) for line in lines(run)] == [0] * KEPT + [BAD - KEPT] * (
        40 - KEPT
    )
    other = make(
        tmp_path / "passed", lies, **settings(data__build="tests.train.test_rollback:Passed")
    )
    trained(other, False)
    once, again = saved(run, 40), saved(other, 40)
    assert once.keys() == again.keys()
    for name, tensor in once.items():
        assert torch.equal(tensor, again[name]), name


class Slow(Spoilt):
    """Which takes long to read the noise."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.first <= PLACE[index] < self.last:
            time.sleep(0.3)
        return super().__getitem__(index)


def test_lines_have_nothing_of_undone_steps(tmp_path: Path) -> None:
    """That step 30 is to be undone is known at step 32, before its line is written."""
    slow = {"data__build": "tests.train.test_rollback:Slow", "train__log_every": 8}
    run = make(tmp_path, **settings(train__rollback=1.5, **slow))
    train(run, False)
    (line,) = (line for line in lines(run) if line["step"] == 32)
    assert line["batches_left_out"] == 32 - KEPT
    assert line["data_wait_s"] < 0.2 and line["step_s"] < 0.2


def test_a_run_that_cannot_get_past_it_ends(tmp_path: Path) -> None:
    spoilt = settings(train__rollback=1.5, data__last=SIZE)
    with pytest.raises(WeftError, match=rf"step \d+ is .* after going back to step {KEPT} 3 times"):
        train(make(tmp_path, **spoilt), False)
    with pytest.raises(WeftError, match=r"is nan\. No checkpoint was written"):
        train(
            make(
                tmp_path / "nan",
                **settings(train__rollback=1.5, train__loss="tests.train.test_rollback:broken"),
            ),
            False,
        )


def broken(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return output.sum() * torch.nan, torch.ones(())


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"checkpoint__every": 0}, "there would be no checkpoint to go back to"),
        ({"sync__name": "bmuf", "sync__period": 4}, "replicas under bmuf are at different steps"),
        ({"pipeline__schedule": "pipedream"}, "pipedream keeps older versions of the weights"),
    ],
)
def test_where_it_cannot_go_back(tmp_path: Path, more: dict[str, Any], says: str) -> None:
    axes = "pp2" if "pipeline__schedule" in more else "dp2"
    free = {"train__clip": None} if axes == "pp2" else {}
    run = make(tmp_path, axes, **settings(train__rollback=2.0, train__accumulate=2, **more))
    run = (
        run.model_copy(update={"train": run.train.model_copy(update={"clip": None})})
        if free
        else run
    )
    with pytest.raises(ConfigError, match=says):
        run_checks.check_run(run)
