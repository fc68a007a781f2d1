"""Failure of one replica is not failure of all: who takes part is decided alike everywhere, what
fails counts for none, one that died or stalled is left out in time, and comes back with what the
others have."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.engine.test_sync import written
from tests.train.test_trainer import Ramps, lines
from weft import sync
from weft.core.errors import Refusal, WeftError, WorkerDied
from weft.engine.replica_sync.membership import (
    ExchangeRound,
    Membership,
    ReplicaGroup,
    is_left_out,
    mark_ended,
)
from weft.engine.replica_sync.outer_optimizer import OuterOptimizer
from weft.launch import replica_workers
from weft.nn.losses import mse
from weft.train.trainer import train


class Replicas:
    """Quorums of several replicas in one process, each with threads of its own."""

    def __init__(self, folder: Path, count: int, places: int = 1, timeout_s: float = 1.0):
        self.store = dist.FileStore(str(folder / "store"), -1)
        self.quorums = {
            (replica, place): Membership(
                ReplicaGroup(self.store, replica), count, place, places, timeout_s
            )
            for replica in range(count)
            for place in range(places)
        }

    def run(self, function: Callable[[Membership], Any], *only: int) -> dict[tuple[int, int], Any]:
        chosen = {key: q for key, q in self.quorums.items() if not only or key[0] in only}
        with ThreadPoolExecutor(len(chosen)) as threads:
            futures = {key: threads.submit(function, q) for key, q in chosen.items()}
            return {key: future.result(60) for key, future in futures.items()}


def summed(quorum: Membership, name: str, value: float) -> tuple[tuple[int, ...], float] | None:
    found = []

    def work(meeting: ExchangeRound) -> None:
        x = torch.tensor([value])
        if meeting.group is not None:
            dist.all_reduce(x, group=meeting.group)
        found[:] = [float(x)]

    meeting = quorum.run(name, work)
    return None if meeting is None else (meeting.members, found[0])


def test_all_take_part_whoever_comes_last(tmp_path: Path) -> None:
    of = Replicas(tmp_path, 3, places=2, timeout_s=20.0)

    def life(quorum: Membership) -> list[Any]:
        chance, seen = random.Random(quorum.replica * 10 + quorum.place), []
        for step in range(10):
            time.sleep(chance.random() / 30)
            seen.append(summed(quorum, f"step/{step}", 10.0**quorum.replica))
        return seen

    assert all(seen == [((0, 1, 2), 111.0)] * 10 for seen in of.run(life).values())


def test_one_that_does_not_come_is_left_out_in_time_and_told(tmp_path: Path) -> None:
    of = Replicas(tmp_path, 3, timeout_s=0.5)
    of.run(lambda q: summed(q, "a", 1.0))
    began = time.monotonic()
    assert set(of.run(lambda q: summed(q, "b", 1.0), 0, 2).values()) == {((0, 2), 2.0)}
    assert 0.4 < time.monotonic() - began < 5
    began = time.monotonic()
    assert set(of.run(lambda q: summed(q, "c", 1.0), 0, 2).values()) == {((0, 2), 2.0)}
    assert time.monotonic() - began < 0.4  # nobody waits for it again
    assert of.run(lambda q: summed(q, "b", 1.0), 1) == {(1, 0): None}


def test_one_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    of = Replicas(tmp_path, 3, timeout_s=30.0)
    of.run(lambda q: summed(q, "a", 1.0))
    mark_ended(of.store, 1)
    began = time.monotonic()
    assert set(of.run(lambda q: summed(q, "b", 1.0), 0, 2).values()) == {((0, 2), 2.0)}
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("breaks", [0, 2])
def test_what_fails_for_one_counts_for_none_and_is_run_again(tmp_path: Path, breaks: int) -> None:
    of = Replicas(tmp_path, 3, places=2, timeout_s=20.0)
    runs: dict[tuple[int, int], int] = dict.fromkeys(of.quorums, 0)

    def life(quorum: Membership) -> ExchangeRound | None:
        def work(meeting: ExchangeRound) -> None:
            me = (quorum.replica, quorum.place)
            runs[me] += 1
            assert meeting.group is not None
            dist.all_reduce(torch.zeros(1), group=meeting.group)
            if me == (breaks, 1) and runs[me] == 1:
                raise RuntimeError("the line is cut")

        return quorum.run("a", work)

    assert all(
        meeting is not None and meeting.members == (0, 1, 2) for meeting in of.run(life).values()
    )
    assert set(runs.values()) == {2}


def test_what_always_fails_here_is_raised(tmp_path: Path) -> None:
    of = Replicas(tmp_path, 3, timeout_s=1.0)

    def life(quorum: Membership) -> Any:
        def work(meeting: ExchangeRound) -> None:
            if quorum.replica == 1:
                raise RuntimeError("no memory")
            if meeting.group is not None:  # fails for the others as a consequence
                dist.all_reduce(torch.zeros(1), group=meeting.group, async_op=True).wait()

        try:
            return quorum.run("a", work)
        except RuntimeError as error:
            mark_ended(of.store, quorum.replica)
            return str(error)

    found = of.run(life)
    assert found[1, 0] == "no memory"
    assert found[0, 0].members == found[2, 0].members == (0, 2)


def test_one_that_asks_is_let_in_by_one_replica(tmp_path: Path) -> None:
    of = Replicas(tmp_path, 3, places=2, timeout_s=0.5)
    given = []

    def life(quorum: Membership) -> Any:
        if quorum.replica == 2:
            group = quorum.ask()
            got = torch.zeros(1)
            dist.irecv(got, group=group, group_src=0).wait()
            return float(got), summed(quorum, "end", 1.0)
        for step in range(50):
            meeting = quorum.run(f"step/{step}", lambda _: None)
            assert meeting is not None
            for group in quorum.grants(meeting):
                given.append(quorum.replica)
                dist.isend(torch.tensor([7.0]), group=group, group_dst=1).wait()
                return summed(quorum, "end", 1.0)
            if meeting.asking:
                return summed(quorum, "end", 1.0)
            time.sleep(0.01)

    found = of.run(life)
    assert found[2, 0] == found[2, 1] == (7.0, ((0, 1, 2), 3.0))
    assert given == [1, 1]


def test_one_that_is_out_is_not_taken_for_one_that_takes_part(tmp_path: Path) -> None:
    """It comes to an exchange before it knows; and a process that came and was then replaced did
    not come."""
    of = Replicas(tmp_path, 3, timeout_s=0.5)
    of.run(lambda q: summed(q, "a", 1.0))
    of.quorums[0, 0].leave_out(1)
    found = of.run(lambda q: summed(q, "b", 1.0))
    assert found == {(0, 0): ((0, 2), 2.0), (1, 0): None, (2, 0): ((0, 2), 2.0)}
    of.quorums[0, 0].take_in(1, 1)  # its next process
    found = of.run(lambda q: summed(q, "c", 1.0))
    assert found == {(0, 0): ((0, 2), 2.0), (1, 0): None, (2, 0): ((0, 2), 2.0)}


def test_who_speaks_for_all_changes_at_one_step_in_all(tmp_path: Path) -> None:
    """An exchange may end within the step that began it, for some of the replicas: it is counted
    where it arrives."""
    of, outers = Replicas(tmp_path, 2, timeout_s=0.5), []
    for quorum in of.quorums.values():
        model = torch.nn.Linear(2, 2)
        plan = weft.plan(
            model,
            "dp2",
            batch=2,
            loss=mse,
            sync=sync.make_sync("diloco", "identity", period=4, delay=1),
        )
        outers.append(
            OuterOptimizer(plan, {name: p.detach() for name, p in model.named_parameters()}, quorum)
        )
    of.quorums[0, 0].leave_out(0)
    alone = of.quorums[1, 0].run("a", lambda _: None)
    assert alone is not None
    of.quorums[1, 0].count(alone)
    said = [[q.leads for q in of.quorums.values()]]
    of.quorums[1, 0].take_in(0, 0)
    for step in (4, 5):
        for outer in outers:
            outer.after(step)
        while step == 4 and not all(outer.fragments[0].exchange.done() for outer in outers):
            time.sleep(0.01)
        said.append([q.leads for q in of.quorums.values()])
    assert said == [[False, True], [False, True], [True, False]]


def test_the_exchange_that_was_sent_last_says_who_takes_part(tmp_path: Path) -> None:
    """Several are under way, one fragment's began later than that of the one after it, and all
    arrive for a checkpoint. Meanwhile one replica gives all that it has to another."""
    of, outers = Replicas(tmp_path, 3, timeout_s=1.0), []
    for quorum in of.quorums.values():
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        made = sync.make_sync("diloco", "identity", period=8, delay=6, fragments=2)
        plan = weft.plan(model, "dp3", batch=3, loss=mse, sync=made)
        outers.append(
            OuterOptimizer(plan, {name: p.detach() for name, p in model.named_parameters()}, quorum)
        )
    of.quorums[0, 0].leave_out(0)
    for (replica, _), meeting in of.run(lambda q: q.run("begin", lambda _: None), 1, 2).items():
        of.quorums[replica, 0].count(meeting)
    leaders = []
    for step in range(1, 19):
        for replica, outer in enumerate(outers):
            if replica or step > 10:
                outer.after(step)
        if step == 10:  # the exchange of step 4 has arrived, and that of step 8 is under way
            assert list(outers[2].kept(step))
            assert all(
                any(fragment.exchange for fragment in outer.fragments) for outer in outers[1:]
            )
            of.quorums[0, 0].take_in(0, 0)
        if step == 12:
            for outer in outers:
                outer.settle()
        leaders.append([replica for (replica, _), quorum in of.quorums.items() if quorum.leads])
    assert leaders == [[1]] * 11 + [[0]] * 7


def test_keys_of_old_exchanges_go(tmp_path: Path) -> None:
    of = Replicas(tmp_path, 2)
    counts = []
    for last in (100, 200):
        of.run(lambda q, last=last: [summed(q, f"{last}/{i}", 1.0) for i in range(100)])
        counts.append(of.store.num_keys())
    assert counts[1] <= counts[0] + 5


def test_who_is_alone_and_left_out_says_so(tmp_path: Path) -> None:
    of = Replicas(tmp_path, 2)
    mark_ended(of.store, 0)
    with pytest.raises(WeftError, match="no other replica runs"):
        of.run(lambda q: q.ask(), 1)


# ---- whole runs ----------------------------------------------------------------------------------


class Failing(Ramps):
    """One replica's process ends, or stands still for a while, when it reads a sample for the
    `at`-th time. One that is started in its place reads when the others have read 20 samples
    without it: more than two steps of each."""

    def __init__(
        self,
        split: str = "train",
        at: int = 0,
        replica: int = 1,
        how: str = "",
        mark: str = "",
        seconds: int = 4,
    ):
        super().__init__(split)
        self.at, self.replica, self.how, self.mark, self.seconds = (
            at,
            replica,
            how,
            Path(mark),
            seconds,
        )
        self.without = 0  # samples read since that one ended

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        from weft.launch.rank_process import replica_slot

        found = super().__getitem__(index)
        here, back, alone = (
            replica_slot(),
            self.mark.with_suffix(".back"),
            self.mark.with_suffix(".alone"),
        )
        if self.shift or here is None:
            return found
        mine = here.replica == self.replica
        if mine and self.reads == self.at and not self.mark.exists():
            self.mark.touch()
            if self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.how == "stalls":
                subprocess.Popen(["sh", "-c", f"sleep {self.seconds}; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                raise ValueError("the tea is cold")
        elif mine and self.mark.exists():
            while here.incarnation and not alone.exists():
                time.sleep(0.01)
            back.touch()
        elif self.mark.exists():
            self.without += 1
            if self.without == 20:
                alone.touch()
        waits = (
            self.mark.exists() and not back.exists()
        )  # the others are not to be done before it is back,
        time.sleep(
            min(0.05 + 0.002 * (self.reads - self.at), 0.2) if waits else 0.01
        )  # however slow the machine
        return found


def failing(
    folder: Path,
    axes: str,
    how: str,
    replica: int,
    sync: dict[str, Any],
    steps: int = 60,
    seconds: int = 9,
) -> Any:
    settings = {f"sync__{key}": value for key, value in sync.items()}
    settings |= {"train__steps": steps, "train__accumulate": 1, "train__batch": 12}
    settings |= {"train__eval_every": 4, "train__eval_batches": 1}
    run = written(folder, axes, settings)
    data = type(run.data).model_validate(
        {
            "build": "tests.engine.test_membership:Failing",
            "at": 30,
            "replica": replica,
            "how": how,
            "mark": str(folder / "mark"),
            "seconds": seconds,
        }
    )
    return run.model_copy(update={"data": data})


PERIODIC = {"name": "diloco", "period": 4, "fragments": 2, "delay": 1, "timeout_s": 3.0}


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("axes", "how", "replica"),
    [
        ("dp3", "dies", 1),
        ("dp3", "dies", 0),
        ("dp3", "stalls", 0),
        ("dp2.tp2", "dies", 1),
        ("dp2", "raises", 1),
    ],
)
def test_the_others_go_on_and_it_comes_back(
    tmp_path: Path, capfd: pytest.CaptureFixture, axes: str, how: str, replica: int
) -> None:
    from weft.core.layout import Layout

    layout = Layout.parse(axes)
    size = layout.size("dp")
    run = failing(tmp_path, axes, how, replica, {**PERIODIC, "codec": "int8"})
    replica_workers.run_replicas(train, layout.replicas(), run, False, threads=1)
    seen = [line for line in lines(run) if "replicas" in line]
    counts = [line["replicas"] for line in seen]
    steps = [line["step"] for line in seen]
    assert steps == sorted(set(steps))  # one replica at a time speaks for all
    assert seen[-1]["step"] == 60
    assert counts[0] == size
    assert min(counts) == size - 1
    assert counts[-1] == size, counts
    assert len(steps) > 30  # the others went on meanwhile
    assert steps == list(range(1, 61))
    said = capfd.readouterr().err
    assert ("has failed and restarts" in said) == (how != "stalls")


@pytest.mark.slow
@pytest.mark.grid(1, ci=1)
@pytest.mark.parametrize(
    "sync", [PERIODIC, {"name": "parameter_server", "staleness": 3, "timeout_s": 1.0}]
)
def test_one_that_never_wakes_does_not_keep_the_run_from_ending(
    tmp_path: Path, capfd: pytest.CaptureFixture, sync: dict[str, Any]
) -> None:
    run = failing(tmp_path, "dp2", "stalls", 1, sync, steps=20, seconds=100)
    assert replica_workers.run_replicas(train, [[0], [1]], run, False, threads=1, needed={0}) == [
        False,
        None,
    ]
    assert lines(run)[-1]["step"] == 20
    assert "replicas 1 stall, and the others are done" in capfd.readouterr().err


def always() -> None:
    from weft.launch.rank_process import replica_slot

    here = replica_slot()
    if here is not None and here.replica == 1:
        raise ValueError(f"incarnation {here.incarnation} is no better")
    time.sleep(1.5)


def test_one_that_always_fails_stays_out(capfd: pytest.CaptureFixture) -> None:
    assert replica_workers.run_replicas(always, [[0], [1]]) == [None, None]
    said = capfd.readouterr().err
    assert said.count("has failed and restarts") == replica_workers.RESTARTS
    assert "the others continue without it" in said


def without_a_store() -> None:
    from weft.launch.rank_process import replica_slot

    here = replica_slot()
    assert here is not None
    if here.replica == 0:
        started = map(int, os.popen(f"pgrep -P {os.getppid()}").read().split())
        keeper = max(
            pid for pid in started if pid < os.getpid()
        )  # the last one before the first replica
        os.kill(keeper, signal.SIGKILL)
    time.sleep(60)


def test_a_store_that_dies_ends_the_run() -> None:
    started = time.monotonic()
    with pytest.raises(WeftError, match="keeps the store of all replicas has died"):
        replica_workers.run_replicas(without_a_store, [[0], [1]])
    assert time.monotonic() - started < 10


class Alone(dist.HashStore):
    """A store to which there is one connection."""

    def clone(self) -> dist.Store:
        raise AssertionError("who watches would wait here for a store that has died")


def test_who_watches_asks_by_the_connection_it_has() -> None:
    store = Alone()
    assert not is_left_out(store, 0)
    dist.PrefixStore("weft/1", store).set("state/0", "out")
    assert is_left_out(store, 0) and not is_left_out(store, 1)
    mark_ended(store, 0)
    assert not is_left_out(store, 0)


def test_one_that_is_needed_ends_the_run() -> None:
    with pytest.raises(WorkerDied, match="incarnation 0 is no better"):
        replica_workers.run_replicas(always, [[0], [1]], needed={1})


def test_all_may_be_needed(capfd: pytest.CaptureFixture) -> None:
    """The first failure is the error, and nobody serves the others."""
    with pytest.raises(WorkerDied, match="incarnation 0 is no better"):
        replica_workers.run_replicas(always, [[0], [1]], all_needed=True)
    said = capfd.readouterr().err
    assert "serves the others" not in said and "has failed and restarts" not in said


def raising() -> None:
    raise ValueError("the tea is cold")


def refused() -> None:
    raise Refusal("a.field", 3, "is odd", "use 4")


def test_a_refusal_is_of_all() -> None:
    with pytest.raises(Refusal, match="is odd"):
        replica_workers.run_replicas(refused, [[0], [1]])


def test_the_run_fails_when_all_have() -> None:
    with pytest.raises(WorkerDied):
        replica_workers.run_replicas(raising, [[0], [1]])
