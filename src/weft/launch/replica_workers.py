"""The processes of replicas that step independently: each replica is a world of its own, so that
it may fail alone.

    run(function, worlds, *args)        the processes of all replicas on this host
    join(backend, threads, worlds)      this process is a rank already: torchrun or srun started it

Replicas meet at a store that a process beside them keeps. When a process ends that should not, the
rest of its replica is ended, the others are told, and the replica is started anew: it catches up
from one of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed as dist

from weft.core import WeftError, WorkerDied
from weft.engine import ReplicaGroup, is_left_out, mark_ended

from . import local_workers
from .choose_backend import Backend
from .environment import launched_rank, local_world_size, on_one_host
from .local_workers import END_S, WorkerProcess, WorldWatch, end_workers, pass_on_stop
from .log import log_line
from .rank_process import POLL_S, RankTask, WorkerSlot
from .scratch_folder import ScratchFolder

RESTARTS = 3  # of one replica
LAST_S = 5.0  # after the others are done, for replicas that were left out and do not end


def run_replicas(
    function: Callable[..., Any],
    worlds: Sequence[Sequence[int]],
    *args: Any,
    threads: int | None = None,
    backend: Backend = "gloo",
    needed: Collection[int] = (),
    all_needed: bool = False,
    hang_s: float | None = None,
) -> list[Any]:
    """Run a function in the processes of replicas, each of which has a process group of its own.

    Args:
        function: called as `function(*args)` in each process.
        worlds: the ranks of each replica.
        args: arguments, which must pickle.
        threads: torch threads of each process; default: cores over processes.
        backend: "gloo" or "nccl".
        needed: replicas without which the others cannot continue.
        all_needed: whether any failure ends the run, with nothing said but the error.
        hang_s: `train.hang_s` of the run.

    Returns:
        The results in rank order; None for the ranks of a replica that failed for good.

    Raises:
        WorkerDied: a replica failed that is needed, or the last one; a Refusal is raised as it is.
    """
    folder = ScratchFolder()
    every: list[WorkerProcess] = []
    size = sum(map(len, worlds))

    def started(
        store: dist.TCPStore, replica: int, incarnation: int
    ) -> tuple[list[WorkerProcess], WorldWatch]:
        file = os.path.join(folder.path, f"{replica}-{incarnation}")
        seat, ranks = WorkerSlot(store.port, replica, incarnation, size), worlds[replica]
        workers = []
        for index in range(len(ranks)):
            own = function, args, index, len(ranks), file, backend, threads
            task = RankTask(*own, seat=seat, hang_s=hang_s)
            workers.append(WorkerProcess(backend, task))
            every.append(workers[-1])
        return workers, WorldWatch(workers, ranks=ranks)

    results: list[Any] = [None] * size
    try:
        with (
            local_workers.replica_store() as (store, keeper),
            ExitStack() as before,
            pass_on_stop(every) as told,
        ):
            before.callback(end_workers, every)  # while they can still meet
            running = {replica: (0, *started(store, replica, 0)) for replica in range(len(worlds))}
            done, last, first = 0, time.monotonic(), None
            while running:
                served = (
                    bool(needed) and not set(needed) & running.keys()
                )  # who is not done by then cannot go on
                try:
                    over = served or (
                        keeper.is_alive() and all(is_left_out(store, each) for each in running)
                    )
                except dist.DistNetworkError:
                    keeper.join(END_S)
                check_store(keeper)
                if done and over and time.monotonic() > last + LAST_S:
                    log_line(
                        f"replicas {', '.join(map(str, running))} stall, and the others are done:"
                        " weft stopped them"
                    )
                    break
                events = [event for _, _, watch in running.values() for event in watch.events()]
                wait([*events, keeper.sentinel], timeout=POLL_S)
                for replica, (incarnation, workers, watch) in list(running.items()):
                    if not watch.over():
                        continue
                    del running[replica]
                    try:
                        for rank, result in zip(worlds[replica], watch.results(), strict=True):
                            results[rank] = result
                        done, last = done + 1, time.monotonic()
                    except WorkerDied as error:
                        end_workers(workers)
                        check_store(keeper)  # else it would be waited for in vain
                        mark_ended(store, replica)
                        first = first or error  # those of others are consequences, if none is left
                        if replica in needed:
                            log_line(
                                f"replica {replica}, which serves the others, has failed;"
                                " --resume continues the run"
                            )
                        if all_needed or replica in needed:
                            raise
                        if not (running or done):
                            raise first from None
                        again = bool(running) and incarnation < RESTARTS and not told.is_set()
                        _say(replica, error, incarnation if again else None)
                        if again:
                            running[replica] = (
                                incarnation + 1,
                                *started(store, replica, incarnation + 1),
                            )
        return results
    finally:
        folder.remove()


def check_store(keeper: BaseProcess) -> None:
    """Raises WeftError if the process that keeps the replicas' store has died."""
    if not keeper.is_alive():
        raise WeftError(
            "the process that keeps the store of all replicas has died; --resume continues the run"
        )


@contextmanager
def join_replica(
    backend: Backend,
    threads: int | None,
    worlds: Sequence[Sequence[int]],
    hang_s: float | None = None,
) -> Iterator[None]:
    """The world of its replica, for a process that torchrun or srun started. Rank 0, which may keep
    the store where replicas meet, waits a while for the others at the end.

    Args:
        backend: "gloo" or "nccl".
        threads: torch threads of this process; default: cores over processes of this host.
        worlds: the ranks of each replica.
        hang_s: `train.hang_s` of the run.
    """
    found = launched_rank()
    assert found is not None
    rank, size, local_rank = found
    store = local_workers.rendezvous_store()
    replica = next(i for i, ranks in enumerate(worlds) if rank in ranks)
    index, world = worlds[replica].index(rank), len(worlds[replica])
    own = dist.PrefixStore(f"replica-{replica}", store)
    with local_workers.enter_rank(
        backend,
        index,
        world,
        local_rank,
        local_world_size(),
        threads,
        own,
        ReplicaGroup(store, replica),
        hang_s,
        None if on_one_host() else (store, rank, sum(map(len, worlds))),
    ):
        yield
    local_workers.leave_world(store, rank, size)


def _say(replica: int, error: WorkerDied, restarts: int | None) -> None:
    what = (
        "and the others continue without it"
        if restarts is None
        else f"and restarts ({restarts + 1} of {RESTARTS})"
    )
    lines = str(error).splitlines()
    log_line(f"replica {replica} has failed {what}: {lines[0]} {lines[-1]}")
