"""Each rank's own time of a step, and a warning where one rank takes twice as long as others.

Ranks wait for one another in every step, so that their step times are all alike: who is slow shows
only in what a rank does by itself. That is, in a step,

- the wait for its batch, and what its callbacks take;
- on a CPU the time in which its training thread computed, or was ready to and had no core
  (Linux). A thread that waits in a collective does neither;
- on CUDA what forwards and backwards took by the device's clock, of the logged step alone. Waits
  for other stages, and sums of gradients beside backward, are not part of it. What a forward or
  backward waits for within (the collectives of `fsdp`, `tp` and `cp`) is: a slow rank makes all of
  such a group slow, and is seen beside another group alone.

Compared are ranks that do the same work: those that differ only on axes that divide samples or
features. Stages may be uneven by design, as may parts of a sequence, and experts have the tokens
that come to them.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from weft.core import Layout, RunConfig, gather_json
from weft.engine import Engine, TrainingEngine
from weft.parallel import DATA_AXES, FEATURE_AXES

from .callbacks import Callbacks

SLOW = 2.0  # times the median of the others
LINES = 3  # logged steps in a row, before it is no accident
SHARE = 0.1  # of a step, that others wait for it at least: else it costs them nothing
PARTS = ("computing", "waiting for batches", "in callbacks")  # of a rank's own time


class RankTimes:
    """Measures one rank of a run. All ranks call `line` together."""

    def __init__(self, run: RunConfig, engine: TrainingEngine, callbacks: Callbacks):
        self._train, self._engine, self._callbacks = run.train, engine, callbacks
        self._peers = peers(engine.global_plan.layout)
        self._by_device = engine.mesh.device.type == "cuda"
        # named workers compute when the driver calls them
        self._live = dist.is_initialized() and isinstance(engine, Engine) and any(self._peers)
        self._ready = _ReadyClock()
        # in steps since the last line, of which there were so many; by the device's clock in one
        self._own_s, self._steps = 0.0, 0
        self._told_s = 0.0  # what callbacks had taken at the last line
        self._slow: SlowRanks | None = None
        self._places: list[int] = []  # in the layout, of the ranks of this process group

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step."""
        logged = number % self._train.log_every == 0 or number == self._train.steps
        if not self._live or (self._by_device and not logged):
            yield
        elif self._by_device:
            with self._actions():
                yield
        else:
            began = self._ready.seconds()
            yield
            self._own_s += self._ready.seconds() - began
            self._steps += 1

    @contextmanager
    def _actions(self) -> Iterator[None]:
        """Adds up the forwards and backwards of a step."""
        engine = self._engine
        assert isinstance(engine, Engine)
        recorded = engine.trace  # by a profile, if there is one
        spans = engine.trace = [] if recorded is None else recorded
        before = len(spans)
        yield
        engine.trace = recorded
        self._own_s = sum(s.stop - s.start for s in spans[before:] if s.kind == "compute")
        self._steps = 1

    def drop(self) -> None:
        """Drop what was measured since the last line."""
        self._own_s, self._steps, self._told_s = 0.0, 0, self._callbacks.took_s

    def line(
        self, steps: int, step_s: float, data_wait_s: float
    ) -> tuple[dict[str, Any], list[str]]:
        """For metrics.jsonl, of the `steps` steps since the last call, of which each took `step_s`
        and waited `data_wait_s` for its batch; and what is to be said at once."""
        if not self._live:
            return {}, []
        own_s, self._own_s = self._own_s / max(self._steps, 1), 0.0
        self._steps = 0
        calls_s, self._told_s = self._callbacks.took_s - self._told_s, self._callbacks.took_s
        if self._slow is None:  # the first line, whose step has set up and compiled
            told = gather_json([self._engine.mesh.place, socket.gethostname()])
            self._places = [place for place, _ in told]
            self._slow = SlowRanks(self._peers, dict(told))
            return {}, []
        if self._by_device and not own_s:  # logged since the run was told to stop
            return {}, []
        mine = torch.tensor([own_s, data_wait_s, calls_s / steps], dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in self._places]
        dist.all_gather(rows, mine)
        parts = {place: row.tolist() for place, row in zip(self._places, rows, strict=True)}
        return self._slow(parts, step_s)

    def summary(self) -> str | None:
        """Of the whole run, where a rank was slow."""
        return None if self._slow is None else self._slow.summary()


class SlowRanks:
    """Finds the ranks that take much longer than those with the same work.

    `peers`: of each rank the others with the same work. `hosts`: of each rank.
    """

    def __init__(self, peers: Sequence[Sequence[int]], hosts: Mapping[int, str]):
        self._peers, self._hosts = peers, hosts
        self._in_a_row: dict[int, int] = {}  # rank -> logged steps in which it was slow
        self._seen = self._slow = 0  # logged steps
        self._worst: tuple[float, int] | None = None  # ratio and rank

    def __call__(
        self, parts: Mapping[int, Sequence[float]], step_s: float
    ) -> tuple[dict[str, Any], list[str]]:
        """What `RankTimes.line` returns. `parts`: rank -> its own seconds of a step, by PARTS."""
        times = {rank: sum(each) for rank, each in parts.items()}
        usual = {
            rank: median(others)
            for rank in times
            if (others := [times[peer] for peer in self._peers[rank] if peer in times])
        }
        if not usual:  # replicas that step by themselves, of one rank each
            return {}, []
        ratios = {rank: times[rank] / max(usual_s, 1e-9) for rank, usual_s in usual.items()}
        said = []
        for rank, ratio in ratios.items():
            slow = ratio > SLOW and times[rank] - usual[rank] > SHARE * step_s
            self._in_a_row[rank] = count = self._in_a_row.get(rank, 0) + 1 if slow else 0
            if count >= LINES:
                self._worst = max(self._worst or (0.0, rank), (ratio, rank))
            if count == LINES:
                most = PARTS[max(range(len(PARTS)), key=parts[rank].__getitem__)]
                said.append(
                    f"warning: {self._named(ratio, rank)} ({times[rank]:.2g} s, most of it {most};"
                    f" they take {usual[rank]:.2g} s)"
                )
        self._seen += 1
        self._slow += max(self._in_a_row.values()) >= LINES
        slowest = max(ratios, key=ratios.__getitem__)
        line = {"slowest_rank": slowest, "slowest_ratio": ratios[slowest]}
        return line | {"slowest_own_s": times[slowest]}, said

    def _named(self, ratio: float, rank: int) -> str:
        return (
            f"rank {rank} on {self._hosts[rank]} takes {ratio:.1f} times as long for its own part"
            " of a step as ranks with the same work"
        )

    def summary(self) -> str | None:
        if self._worst is None:
            return None
        return f"{self._named(*self._worst)}, at {self._slow} of {self._seen} logged steps"


def peers(layout: Layout) -> list[tuple[int, ...]]:
    """Of each rank the others that do the same work."""
    alike = [
        axis
        for axis in (*DATA_AXES, *FEATURE_AXES)
        if axis in layout.axes and not layout.spreads_experts(axis)
    ]
    return [
        tuple(other for other in layout.group_ranks(rank, *alike) if other != rank)
        for rank in range(layout.world)
    ]


class _ReadyClock:
    """Seconds in which the calling thread has computed, or was ready to and had no core. One thread
    makes it and asks it. Where the system does not say how long a thread had no core, as on macOS,
    that counts for nothing."""

    def __init__(self) -> None:
        self._waits: int | None = None
        try:
            self._waits = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return

    def seconds(self) -> float:
        without_core_s = 0.0
        if self._waits is not None:
            # Linux, Documentation/scheduler/sched-stats.rst: nanoseconds on a core, nanoseconds
            # ready without one, number of turns
            without_core_s = int(os.pread(self._waits, 100, 0).split()[1]) / 1e9
        return time.thread_time() + without_core_s

    def __del__(self) -> None:
        if self._waits is not None:
            os.close(self._waits)
