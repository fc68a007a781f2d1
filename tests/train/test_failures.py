"""A run whose processes die, at any moment: it goes on by itself, and ends with the weights of a
run left alone."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands import PATH, Command, children, launched
from tests.train.test_trainer import RUN, Ramps
from weft import checkpoint
from weft.core.errors import DamagedCheckpoint, WeftError, WorkerDied
from weft.core.shards import whole_shard
from weft.launch.restarts import run_with_restarts
from weft.launch.watchdog import RankLocation, hang_report

STEPS = 40


class Slow(Ramps):
    """Takes its time, so that there is some in which to die."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.01)
        return super().__getitem__(index)


def words(folder: Path, axes: str, *more: str) -> list[str]:
    """Of the command that begins a run there."""
    folder.mkdir(parents=True, exist_ok=True)
    text = RUN.replace("tests.train.test_trainer:Ramps", "tests.train.test_failures:Slow").replace(
        "steps = 6", f"steps = {STEPS}"
    )
    (folder / "run.toml").write_text(text)
    asked = ["train", str(folder / "run.toml"), "--output", str(folder / "out"), "--layout", axes]
    return [*asked, "--set", "checkpoint.every=2", "--set", "checkpoint.restarts=9", *more]


@contextmanager
def begun(folder: Path, axes: str, *more: str, launcher: tuple[str, ...] = ()) -> Iterator[Any]:
    asked = words(folder, axes, *more)
    process = launched(launcher, *asked) if launcher else Command(folder / "log", *asked)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def weights(folder: Path, steps: int = STEPS) -> dict[str, torch.Tensor]:
    contents = checkpoint.read_index(folder / "out" / "checkpoints")
    assert contents.step == steps
    found = {name: torch.empty(s.shape, dtype=s.dtype) for name, s in contents.tensors.items()}
    checkpoint.load_checkpoint(
        folder / "out" / "checkpoints",
        None,
        [whole_shard(name, tensor) for name, tensor in found.items()],
    )
    return found


def steps_of(folder: Path) -> list[int]:
    file = folder / "out" / "metrics.jsonl"
    return (
        [json.loads(line)["step"] for line in file.read_text().splitlines()]
        if file.exists()
        else []
    )


@pytest.mark.grid(1, ci=1)
@pytest.mark.parametrize("axes", ["dp2", "pp2"])
def test_ranks_that_are_killed_cost_nothing_but_time(tmp_path: Path, axes: str) -> None:
    """At moments drawn at random, while checkpoints are written too."""
    with begun(tmp_path / "whole", axes) as process:
        assert process.wait(120) == 0, process.said()
    moments = random.Random(axes)
    with begun(tmp_path / "killed", axes) as process:
        for _ in range(2):
            at = (steps_of(tmp_path / "killed") or [0])[-1]
            while process.poll() is None and (steps_of(tmp_path / "killed") or [0])[-1] < at + 4:
                time.sleep(0.01)
            time.sleep(moments.random() * 0.1)
            alive = children(process.pid)
            if alive:
                os.kill(moments.choice(alive), signal.SIGKILL)
            time.sleep(1.0)  # it is started anew meanwhile
        output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    assert output.count("going on from step") == 2, output
    assert steps_of(tmp_path / "killed") == list(range(1, STEPS + 1))
    once, other = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert once.keys() == other.keys() and all(
        torch.equal(once[name], other[name]) for name in once
    )


@pytest.mark.grid(1, ci=1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_run_that_is_told_to_stop_says_that_it_goes_on(
    tmp_path: Path, number: signal.Signals
) -> None:
    """With a code of its own, after a checkpoint, and without being started anew."""
    with begun(tmp_path, "dp2") as process:
        while len(steps_of(tmp_path)) < 3:
            time.sleep(0.01)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert (
        re.search(r"stopped +saved after step \d+; --resume goes on", output)
        and "going on from" not in output
    )
    assert 3 <= checkpoint.read_index(tmp_path / "out" / "checkpoints").step < STEPS
    with begun(tmp_path, "dp2", "--resume") as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert steps_of(tmp_path) == list(range(1, STEPS + 1))


@pytest.mark.grid(1)
def test_a_run_saves_when_its_terminal_closes(tmp_path: Path) -> None:
    terminal, there = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "weft", *words(tmp_path, "dp2", "--set", "train.steps=900")],
        env={**os.environ, "PYTHONPATH": PATH},
        stdin=there,
        stdout=there,
        stderr=there,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    try:
        os.close(there)
        os.set_blocking(terminal, False)
        while len(steps_of(tmp_path)) < 3:
            time.sleep(0.01)
            with suppress(BlockingIOError):  # or it is full, and the run waits
                os.read(terminal, 1 << 16)
        os.close(terminal)
        assert process.wait(150) == 75
    finally:
        process.kill()
        process.wait(10)
    assert 3 <= checkpoint.read_index(tmp_path / "out" / "checkpoints").step < 900


@pytest.mark.grid(1)
def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    command = ["nohup", sys.executable, "-m", "weft", *words(tmp_path, "dp2")]
    with (tmp_path / "log").open("w") as log:
        env = {**os.environ, "PYTHONPATH": PATH}
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        while len(steps_of(tmp_path)) < 3:
            time.sleep(0.01)
        for pid in (process.pid, *children(process.pid)):
            os.kill(pid, signal.SIGHUP)
        assert process.wait(60) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait(10)
    assert steps_of(tmp_path) == list(range(1, STEPS + 1))


@pytest.mark.grid(1)
def test_all_processes_of_a_run_that_reads_ahead_may_be_told_to_stop(tmp_path: Path) -> None:
    """As SLURM does at its time limit: those that read are among them."""
    with begun(tmp_path, "dp2", "--set", "data.workers=2", "--set", "data.prefetch=1") as process:
        while len(steps_of(tmp_path)) < 3:
            time.sleep(0.01)
        ranks = children(process.pid)
        readers = [pid for rank in ranks for pid in children(rank)]
        assert len(readers) == 4
        for pid in [*readers, *ranks, process.pid]:
            os.kill(pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert 3 <= checkpoint.read_index(tmp_path / "out" / "checkpoints").step < STEPS


@pytest.mark.slow
def test_a_rank_that_stops_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    with begun(tmp_path, "dp2", "--set", "train.hang_s=6") as process:  # a disk may take seconds
        while len(steps_of(tmp_path)) < 5:
            time.sleep(0.01)
        os.kill(children(process.pid)[1], signal.SIGSTOP)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    # a rank that was stopped while it saved has ten times as long
    assert re.search(r"no progress for 60? s: rank 1 does not answer", output), output
    assert re.search(
        r"  rank 0: after step \d+, waits .*, at .*weft/\S+\.py:\d+ in \w+: `.*`", output
    ), output
    assert re.search(
        r"collective number \d+ among ranks 0, 1, all_?reduce of float \[.*\]: .*rank 1 does not"
        r" answer",
        output,
    ), output
    assert "going on from step" in output, output
    assert steps_of(tmp_path) == list(range(1, STEPS + 1))


def test_replicas_that_step_by_themselves_set_a_damaged_checkpoint_aside(tmp_path: Path) -> None:
    local = ("--set", "sync.name=local_sgd", "--set", "sync.period=2")
    with begun(tmp_path, "dp2", *local, "--set", "train.steps=8") as process:
        assert process.wait(120) == 0, process.said()
    folder = tmp_path / "out" / "checkpoints"
    last, before = checkpoint.saved_steps(folder)[-1:-3:-1]
    next((folder / f"step-{last:06d}").glob("*.safetensors")).unlink()
    with begun(tmp_path, "dp2", *local, "--set", "train.steps=12", "--resume") as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert f"set aside, going on from step {before}" in output, output
    assert checkpoint.latest_step(folder) == 12


class Lagging(Slow):
    """Data that rank 1 waits for."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            time.sleep(1000)  # for data


def test_a_hang_before_the_first_step_is_named(tmp_path: Path) -> None:
    data = 'data.build="tests.train.test_failures:Lagging"'
    with begun(tmp_path, "dp2", "--set", "train.hang_s=0.3", "--set", data) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert (
        "no progress for 3 s: rank 1 is in no collective, and the other ranks wait for it"
    ) in output
    assert "rank 1: after it began building data and model, is in no collective" in output
    assert "time.sleep(1000)  # for data" in output


def test_what_is_said_of_a_hang() -> None:
    here = RankLocation(
        "step 4",
        "waits in all_reduce, at a.py:3 in f",
        [("0", [0, 1, 2], 7, "all_reduce of float [5]")],
        {"0": 7},
    )
    there = RankLocation("step 4", "is in no collective, but at b.py:7", [], {"0": 6})
    assert "rank 1 is in no collective, and the other ranks wait for it" in hang_report(
        {0: here, 1: there, 2: here}, 3, 5
    )
    assert "  rank 1: after step 4, is in no collective, but at b.py:7" in hang_report(
        {0: here, 1: there}, 2, 5
    )
    assert "all ranks wait in collectives, but in different ones" in hang_report(
        {0: here, 1: here}, 2, 5
    )
    assert "rank 1, 2 does not answer" in hang_report({0: here}, 3, 5)
    what = "    collective number 7 among ranks 0, 1, 2, all_reduce of float [5]: "
    assert what + "rank 1 has not begun it\n" in hang_report({0: here, 1: there, 2: here}, 3, 5)
    assert what + "rank 1 has not begun it; rank 2 does not answer" in hang_report(
        {0: here, 1: there}, 3, 5
    )
    assert what + "all have begun it" in hang_report({0: here, 1: here, 2: here}, 3, 5)


@pytest.mark.grid(1, ci=1)
@pytest.mark.parametrize("what", ["index", "rank"])
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(tmp_path: Path, what: str) -> None:
    with begun(tmp_path, "dp2") as process:
        while len(steps_of(tmp_path)) < 9:
            time.sleep(0.01)
        process.terminate()
        process.communicate(timeout=60)
    folder = tmp_path / "out" / "checkpoints"
    last, before = (checkpoint.saved_steps(folder)[place] for place in (-1, -2))
    file = next(
        path
        for path in sorted((folder / f"step-{last:06d}").iterdir())
        if path.name.startswith(what)
    )
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with begun(tmp_path, "dp2", "--resume") as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert f"set aside, going on from step {before}" in output and f"after step {before}" in output
    assert (folder / f"step-{last:06d}.damaged").is_dir() and steps_of(tmp_path) == list(
        range(1, STEPS + 1)
    )


@pytest.mark.slow
def test_what_torchrun_starts_anew_goes_on(tmp_path: Path) -> None:
    """With a store that torchrun keeps, and in it the addresses of those that died."""
    torchrun = (
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--max-restarts=1",
        "--standalone",
        "-m",
    )
    with begun(tmp_path, "dp2", launcher=torchrun) as process:
        while len(steps_of(tmp_path)) < 5:
            time.sleep(0.01)
        os.kill(children(process.pid)[1], signal.SIGKILL)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert output.count("resumed") == 1 and steps_of(tmp_path) == list(range(1, STEPS + 1))


def test_when_a_run_is_not_started_anew() -> None:
    started: list[bool] = []

    def start(errors: list[Any], resume: bool) -> str:
        started.append(resume)
        if errors:
            raise errors.pop(0)
        return "done"

    def died(report: str = "killed by SIGKILL", **marks: bool) -> WorkerDied:
        error = WorkerDied(1, report)
        for name, value in marks.items():
            setattr(error, name, value)
        return error

    def tried(errors: list[Any], steps: list[int | None], restarts: int = 3) -> str:
        started.clear()
        return run_with_restarts(
            lambda resume: start(errors, resume),
            lambda: steps.pop(0),
            lambda: bool(steps),
            False,
            restarts,
        )

    assert tried([died(), died("gone")], [2, 4]) == "done" and started == [False, True, True]
    assert (
        tried([died(), died(), died()], [2, 2, 2]) == "done"
    )  # nothing says that it will be killed again
    for errors, steps in (
        ([died()], [None]),  # nothing to go on from
        ([died(meant=True)], [2]),  # a loss that is not finite would be so again
        ([died(stopped=True)], [2]),
        ([died("ValueError: no"), died("ValueError: no")], [2, 2]),  # at the same place
    ):
        with pytest.raises(WorkerDied):
            tried([*errors], [*steps])
        assert len(started) == len(errors)
    with pytest.raises(WorkerDied):
        tried([died(str(i)) for i in range(9)], [2, 4, 6, 8, 10])
    assert len(started) == 4
    with pytest.raises(WeftError):
        tried([WeftError("no")], [2])
    damaged = DamagedCheckpoint("checkpoint", "step-000004", "was changed", "copy it again")
    assert tried([damaged], [2]) == "done"
    with pytest.raises(DamagedCheckpoint):
        tried([damaged], [])
