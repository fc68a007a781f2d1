"""Processes that make batches: the same batches in the same order, and an end of theirs."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from tests.run_files import TINY
from weft.core import DataError, Refusal, WeftError
from weft.core.run_config import load_run
from weft.train.data import Loader
from weft.train.prefetch import Prefetcher, prefetched
from weft.train.sample_stream import Stream
from weft.train.stream_loader import AnyLoader, StreamLoader
from weft.train.trainer import train

PARENT = os.getpid()


class Numbers(IterableDataset):
    """Takes its part where torch says that there are others, as datasets for DataLoader do."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        step = info.num_workers if info else 1
        for number in range(info.id if info else 0, 90, step):
            yield {"x": number}


class Rows:
    """Sample `odd` of another process is as `of` says."""

    def __init__(self, odd: int = -1, of: str = ""):
        self.odd, self.of = odd, of

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == self.odd and os.getpid() != PARENT:
            if self.of == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.of == "wait":
                time.sleep(1000)
            if self.of == "refuse":
                raise DataError("row", index, "is torn", "mend it")
            raise LookupError("there is no such row")
        return {"x": torch.tensor(index)}


def mapped(start: int = 0, position: str | None = None) -> AnyLoader:
    return Loader(Rows(), 4, seed=3, start=start)


def streamed(start: int = 0, position: str | None = None) -> AnyLoader:
    stream = Stream(Numbers)
    return StreamLoader(stream, 4, seed=3, shuffle_buffer=8, start=start, position=position)


def take(loader: Any, steps: int) -> list[tuple[list[int], str | None]]:
    return [(next(loader)["x"].tolist(), loader.position()) for _ in range(steps)]


@pytest.mark.parametrize("make", [mapped, streamed])
@pytest.mark.parametrize("workers", [1, 2])
def test_batches_and_their_positions_are_those_of_the_loader(
    make: Callable[..., AnyLoader], workers: int
) -> None:
    alone, before = make(), torch.get_rng_state()
    whole = take(alone, 30)
    epoch = alone.epoch(30)
    whole += take(alone, 30)
    with prefetched(make(), workers, 2, False) as loader:
        assert take(loader, 30) == whole[:30]
        assert loader.epoch(30) == epoch > 0
        loader.step = 45
        assert take(loader, 5) == whole[45:50]
    with prefetched(make(30, whole[29][1]), workers, 2, False) as loader:
        assert loader.position() == whole[29][1]
        assert take(loader, 30) == whole[30:]
    assert torch.equal(torch.get_rng_state(), before)


def test_processes_end_with_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data._utils.signal_handling, "_SIGCHLD_handler_set", False)
    handler, others = signal.getsignal(signal.SIGCHLD), {*multiprocessing.active_children()}
    with prefetched(mapped(), 2, 2, False) as loader:
        next(loader)  # type: ignore[call-overload]
        mine = {*multiprocessing.active_children()} - others
        assert len(mine) == 2
    gone({process.pid for process in mine})
    assert signal.getsignal(signal.SIGCHLD) == handler


def gone(pids: set[int | None]) -> None:
    """Waits for processes to end."""
    deadline = time.monotonic() + 20
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running(pid: int | None) -> bool:
    multiprocessing.active_children()  # has those of this process collected
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_stops_a_run_does_not_end_its_processes() -> None:
    others = {*multiprocessing.active_children()}
    with prefetched(mapped(), 2, 2, False) as loader:
        first = take(loader, 1)
        mine = {*multiprocessing.active_children()} - others
        for process in mine:
            os.kill(process.pid or 0, signal.SIGTERM)
        assert first + take(loader, 29) == take(mapped(), 30)


def stuck() -> AnyLoader:
    """Its second batch is never made."""
    return Loader(Rows(take(mapped(), 2)[1][0][0], "wait"), 4, seed=3)


def test_a_process_that_is_stuck_ends_with_the_training() -> None:
    others = {*multiprocessing.active_children()}
    with prefetched(stuck(), 1, 2, False) as loader:
        next(loader)  # type: ignore[call-overload]
        mine = {*multiprocessing.active_children()} - others
        began = time.monotonic()
    assert len(mine) == 1 and time.monotonic() - began < 8  # 5 of them are torch's
    assert not any(process.is_alive() for process in mine)


def test_a_process_that_is_stuck_ends_with_a_rank_that_dies() -> None:
    context = multiprocessing.get_context("fork")
    told, tells = context.Pipe(False)
    rank = context.Process(target=die_while_it_reads, args=(tells,))
    rank.start()
    gone({told.recv()})


def die_while_it_reads(tells: Any) -> None:
    loader = Prefetcher(stuck(), 1, 2, False)
    next(loader)
    tells.send(multiprocessing.active_children()[0].pid)
    os._exit(1)


@pytest.mark.parametrize(
    ("of", "kind", "says"),
    [
        ("kill", WeftError, r"a process of data.workers died \(.*fewer data.workers"),
        ("refuse", Refusal, "row = 5: is torn. Mend it."),
        ("raise", LookupError, "there is no such row"),
    ],
)
def test_what_happens_to_a_process_ends_the_run(of: str, kind: type[Exception], says: str) -> None:
    made = Loader(Rows(5, of), 4, seed=3)
    with prefetched(made, 2, 2, False) as loader, pytest.raises(kind, match=says) as found:
        take(loader, 10)
    assert of == "raise" or "\n" not in str(found.value)


def test_a_run_is_the_same_with_processes_that_read(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TINY)
    losses = []
    for workers in (0, 2):
        keys = {"data.workers": str(workers), "train.steps": "6", "train.log_every": "2"}
        run = load_run(
            tmp_path / "run.toml",
            keys | {"output": f'"{tmp_path}/{workers}"', "checkpoint.every": "6"},
        )
        train(run, False)
        lines = [json.loads(line) for line in (tmp_path / f"{workers}/metrics.jsonl").open()]
        assert all(line["data_wait_s"] >= 0 for line in lines)
        losses.append([line["loss"] for line in lines])
    assert losses[0] == losses[1]


def test_prefetch_needs_processes(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TINY)
    with pytest.raises(
        Refusal, match=r"data.prefetch = 4: applies only to data.workers.*Set data.workers"
    ):
        load_run(tmp_path / "run.toml", {"data.prefetch": "4"})
