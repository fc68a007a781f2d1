"""Each rank's own time of a step, and the warning that names a slow one."""

from __future__ import annotations

import os
import re
import socket
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.commands import Command
from tests.train.test_trainer import RUN, lines, make
from weft.callbacks import WatchedRun
from weft.core import Layout, RunConfig
from weft.launch.local_workers import Pool
from weft.losses import next_token
from weft.train import rank_times
from weft.train.rank_times import RankTimes, SlowRanks, peers
from weft.train.trainer import train

HERE = "tests.train.test_rank_times"
BUSY_S = 0.3  # much longer than a step of the model, on a loaded machine too


def compute(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def loss_slow_on_rank_2(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    if os.environ.get("RANK") == "2":
        compute(BUSY_S)
    return next_token(output, batch)


def loss_slow_everywhere(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    compute(BUSY_S / 2)
    return next_token(output, batch)


class SlowOnRank:
    def __init__(self, rank: int):
        self.rank = rank

    def on_step_end(self, run: WatchedRun, result: Any, metrics: Any) -> None:
        if run.rank == self.rank:
            compute(BUSY_S)


def ran(folder: Path, axes: str, **settings: str) -> tuple[RunConfig, str]:
    """`weft train` of RUN, and what it said."""
    (folder / "run.toml").write_text(RUN)
    sets = [part for key, value in settings.items() for part in ("--set", f"train.{key}={value}")]
    given = [str(folder / "run.toml"), "--layout", axes, "--output", str(folder / "out"), *sets]
    command = Command(folder / "log", "train", *given)
    assert command.wait(120) == 0, command.said()
    return make(folder, axes), command.said()


def test_a_slow_rank_is_named_once(tmp_path: Path) -> None:
    run, said = ran(tmp_path, "dp4", loss=f'"{HERE}:loss_slow_on_rank_2"')
    found = [line for line in said.splitlines() if "warning" in line]
    assert len(found) == 1, said
    named = rf"step [456]/6  warning: rank 2 on {socket.gethostname()} takes "
    assert re.match(named, found[0])  # the first step sets up
    assert "times as long for its own part of a step as ranks with the same work" in found[0]
    assert "most of it computing; they take " in found[0]
    [summary] = [line for line in said.splitlines() if line.startswith("slow ")]
    assert "rank 2 on" in summary and re.search("at [123] of 5 logged steps$", summary)
    measured = [line for line in lines(run) if "slowest_rank" in line]
    assert [line["step"] for line in measured] == [2, 3, 4, 5, 6]
    slow = [line for line in measured if line["slowest_rank"] == 2 and line["slowest_ratio"] > 2]
    assert len(slow) >= 3 and all(line["slowest_own_s"] > BUSY_S for line in slow)


def test_of_uneven_stages_the_slow_rank_alone_is_named(tmp_path: Path) -> None:
    slow = f'[{{name = "{HERE}:SlowOnRank", rank = 1}}]'
    uneven = f'"{HERE}:loss_slow_everywhere"'
    _, said = ran(tmp_path, "pp2.dp2", callbacks=slow, loss=uneven)
    found = [line for line in said.splitlines() if "warning" in line]
    assert len(found) == 1 and "warning: rank 1 on" in found[0], said
    assert "most of it in callbacks" in found[0]


def test_stages_may_be_uneven(tmp_path: Path) -> None:
    _, said = ran(tmp_path, "pp2.dp2", loss=f'"{HERE}:loss_slow_everywhere"', log_every="2")
    assert "warning" not in said and "\nslow " not in said


def test_a_pipeline_alone_has_nothing_to_compare(tmp_path: Path, pool: Pool) -> None:
    run = make(tmp_path, "pp2")
    pool.run(train, run, False, world=2)
    assert not any("slowest_rank" in line for line in lines(run))


def by_device(run: RunConfig) -> None:
    """Trains by the device's clock, as on CUDA; here it is the host's."""
    made = RankTimes.__init__

    def init(self: RankTimes, *given: Any) -> None:
        made(self, *given)
        self._by_device = True

    RankTimes.__init__ = init  # type: ignore[method-assign]
    try:
        train(run, False)
    finally:
        RankTimes.__init__ = made  # type: ignore[method-assign]


@pytest.mark.parametrize("profile", [None, "3-4"])
def test_by_the_device_forwards_and_backwards_of_the_logged_step_count(
    tmp_path: Path, pool: Pool, profile: str | None
) -> None:
    uneven = {"train__loss": f"{HERE}:loss_slow_everywhere", "train__log_every": 2}
    run = make(tmp_path, "dp2", **uneven, **({"train__profile": profile} if profile else {}))
    pool.run(by_device, run, world=2)
    measured = [line for line in lines(run) if "slowest_own_s" in line]
    assert [line["step"] for line in measured] == [2, 4, 6]
    for line in measured:  # of one step, which has two microbatches
        assert BUSY_S < line["slowest_own_s"] < 1.6 * line["step_s"]
    assert bool(profile) == (Path(run.output) / "profile.json").exists()


# ---- which ranks are slow ------------------------------------------------------------------------


def evenly(count: int, **slow: float) -> dict[int, tuple[float, ...]]:
    own = dict.fromkeys(range(count), 0.1) | {int(k[1:]): v for k, v in slow.items()}
    return {rank: (0.04, own_s - 0.04, 0.0) for rank, own_s in own.items()}


def ranks(axes: str) -> SlowRanks:
    found = peers(Layout.parse(axes))
    return SlowRanks(found, {rank: f"host{rank}" for rank in range(len(found))})


def test_a_warning_comes_once_an_episode() -> None:
    slow, said = ranks("dp4"), []
    for own_s in (0.3, 0.3, 0.3, 0.4, 0.3, 0.1, 0.3, 0.3, 0.3):
        line, warnings = slow(evenly(4, r3=own_s), 0.5)
        said.append(len(warnings))
        assert line["slowest_ratio"] == pytest.approx(own_s / 0.1)
        assert line["slowest_own_s"] == pytest.approx(own_s)
    assert said == [0, 0, 1, 0, 0, 0, 0, 0, 1]
    expected = "rank 3 on host3 takes 4.0 times as long for its own part of a step"
    summary = slow.summary() or ""
    assert summary.startswith(expected) and summary.endswith("at 4 of 9 logged steps")


@pytest.mark.parametrize(
    ("rows", "step_s"),
    [
        ([0.3, 0.3, 0.1, 0.3, 0.3], 0.5),  # never three in a row
        ([0.19] * 5, 0.5),  # not twice
        ([0.3] * 5, 9.0),  # of a step that is long for another reason
    ],
)
def test_what_is_no_slow_rank(rows: list[float], step_s: float) -> None:
    slow = ranks("dp4")
    assert not any(slow(evenly(4, r3=own_s), step_s)[1] for own_s in rows)
    assert slow.summary() is None


def test_ranks_with_the_same_work() -> None:
    assert peers(Layout.parse("dp2.tp2"))[0] == (1, 2, 3)
    assert peers(Layout.parse("pp2.dp2"))[2] == (3,)
    assert peers(Layout.parse("fsdp2.cp2"))[1] == (3,)
    assert peers(Layout.parse("dp2+ep.fsdp2"))[0] == (1,)  # experts have other tokens
    assert peers(Layout.parse("pp4")) == [()] * 4


# ---- the clock of a thread -----------------------------------------------------------------------


def test_waiting_is_no_work_and_computing_is() -> None:
    clock = rank_times._ReadyClock()
    began = clock.seconds()
    time.sleep(0.3)
    assert clock.seconds() - began < 0.1
    began = clock.seconds()
    compute(0.3)
    assert 0.2 < clock.seconds() - began < 0.4


def crowded(core: int, answer: Any) -> None:
    os.sched_setaffinity(0, {core})
    clock = rank_times._ReadyClock()
    since, began = time.thread_time(), clock.seconds()
    compute(1.0)
    answer.send((time.thread_time() - since, clock.seconds() - began))


@pytest.mark.skipif(
    not os.path.exists("/proc/thread-self/schedstat"), reason="only Linux counts it"
)
def test_waiting_for_a_core_is_work() -> None:
    """As of a rank that shares its core: it is slow, though it computes no longer."""
    context, core = get_context("fork"), min(os.sched_getaffinity(0))
    pairs = [context.Pipe() for _ in range(2)]
    both = [context.Process(target=crowded, args=(core, theirs)) for _, theirs in pairs]
    for each in both:
        each.start()
    for (mine, _), process in zip(pairs, both, strict=True):
        computed_s, ready_s = mine.recv()
        process.join()
        assert computed_s < 0.8 and 0.9 < ready_s < 1.2
