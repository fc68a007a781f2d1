"""The processes of this host, one per rank: started, watched and ended by their parent.

    run(function, world, *args)     as many processes as ranks, for one task
    Pool(world).run(function, ...)  the same processes for many tasks, each in a fresh process group
    join(backend)                   this process is a rank already: torchrun or srun started it

Ranks meet through a file, so no port is guessed. If a rank fails, the parent ends the others and
raises the error of the one that failed first. Ranks end if the parent dies.

On Linux ranks are forked: they start in milliseconds and inherit what the parent has imported. CUDA
does not survive a fork, so ranks that use it are spawned, as are those on other systems, and where
a backward of the parent has started threads for GPUs; their function and arguments are pickled.
`start` chooses otherwise.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist

from weft._torch.forks import autograd_survives_fork
from weft.core import TIMEOUT_S, WorkerDied

from .choose_backend import Backend
from .environment import launched_rank, local_world_size, on_one_host
from .gate import LOOPBACK
from .rank_process import (
    POLL_S,
    RankTask,
    TaskFailure,
    TaskResult,
    UnsendableResult,
    WorkerSlot,
    enter_rank,
    follow_parent,
    rendezvous_store,
    serve_tasks,
)
from .scratch_folder import ScratchFolder
from .signals import on_stop_signal
from .stores import join_store, keep_store

# after the first failure: a killed peer is seen later than the errors of those that lost it
GRACE_S = 0.5
END_S = 1.0  # from SIGTERM to SIGKILL
STORE_S = 15.0  # for an answer of the store where replicas meet

StartMethod = Literal["fork", "spawn"]


def run_workers(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    threads: int | None = None,
    backend: Backend = "gloo",
    names: Sequence[str] = (),
    hang_s: float | None = None,
    start: StartMethod | None = None,
) -> list[Any]:
    """Run a function in processes of this host, inside a process group.

    A SIGTERM is passed on to the ranks, so that they can end in order.

    Args:
        function: called as `function(*args)` in each process.
        world: number of processes.
        args: arguments, which must pickle.
        threads: torch threads of each process; default: cores over `world`.
        backend: "gloo" or "nccl".
        names: of the ranks, for errors.
        hang_s: `train.hang_s` of the run.
        start: how the processes begin. Default: what is safe with the backend.

    Returns:
        The results in rank order.

    Raises:
        WorkerDied: with the error of the rank that failed first; a Refusal is raised as it is.
    """
    folder = ScratchFolder()
    file = os.path.join(folder.path, "store")
    workers: list[WorkerProcess] = []
    try:
        with pass_on_stop(workers) as told:
            for rank in range(world):
                task = RankTask(function, args, rank, world, file, backend, threads, hang_s=hang_s)
                workers.append(WorkerProcess(backend, task, start))
            try:
                return _collect(WorldWatch(workers, names=names))
            except WorkerDied as error:
                error.stopped = told.is_set()
                raise
    finally:
        end_workers(workers)
        folder.remove()


class Pool:
    """`world` processes kept alive for many tasks. A context manager.

    Functions and arguments are pickled: name functions at the top of a module. After a task that
    failed, the processes that ran it are replaced.
    """

    def __init__(self, world: int, threads: int | None = 1, backend: Backend = "gloo"):
        # What DTensor loads at its first use, too: once here, and not in every process.
        importlib.import_module("torch.distributed.tensor.debug")
        self._threads, self._backend, self._tasks = threads, backend, 0
        self._folder = ScratchFolder()
        self._workers = [WorkerProcess(backend) for _ in range(world)]

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world: int | None = None,
        timeout: float | None = None,
        replica_ranks: Sequence[Sequence[int]] = (),
    ) -> list[Any]:
        """`function(*args)` on the first `world` processes (all if left out); the results in rank
        order.

        After `timeout` seconds WorkerDied says where every rank hangs. `replica_ranks`: the ranks
        of each replica, where replicas are worlds of their own (as of `replicas.run`). Errors as
        of `run`.
        """
        world = sum(map(len, replica_ranks)) or (len(self._workers) if world is None else world)
        if not 1 <= world <= len(self._workers):
            raise ValueError(f"{world} ranks in a pool of {len(self._workers)} processes")
        for index, worker in enumerate(self._workers):
            if worker.process.exitcode is not None:  # ended from outside since the last task
                self._workers[index] = WorkerProcess(self._backend)
        self._tasks += 1
        file = os.path.join(self._folder.path, str(self._tasks))
        tasks = [
            RankTask(
                function,
                args,
                rank,
                world,
                file,
                self._backend,
                self._threads,
                timeout,
                f"{file}.{rank}",
            )
            for rank in range(world)
        ]
        try:
            with replica_store() if replica_ranks else nullcontext((None, None)) as (store, _):
                for replica, ranks in enumerate(replica_ranks):
                    for index, rank in enumerate(ranks):
                        seat = (
                            WorkerSlot(store.port, replica, 0, world) if store is not None else None
                        )
                        own = f"{file}-{replica}"
                        tasks[rank] = replace(
                            tasks[rank], rank=index, world=len(ranks), file=own, seat=seat
                        )
                for worker, task in zip(self._workers, tasks, strict=False):
                    worker.connection.send_bytes(pickle.dumps(task))
                return _collect(
                    WorldWatch(
                        self._workers[:world], timeout, stacks=[task.stack for task in tasks]
                    )
                )
        except BaseException:
            end_workers(self._workers[:world])
            self._workers[:world] = [WorkerProcess(self._backend) for _ in range(world)]
            raise

    def close(self) -> None:
        """End the processes."""
        deadline = time.monotonic() + 2 * END_S
        for worker in reversed(self._workers):  # a later one may hold the end of an earlier one
            worker.connection.close()  # an idle process ends by itself, and runs its exit handlers
            worker.process.join(max(0.0, deadline - time.monotonic()))
        end_workers(self._workers)
        self._workers = []
        self._folder.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def join_world(
    backend: Backend = "gloo",
    threads: int | None = None,
    world: int | None = None,
    store: dist.Store | None = None,
    hang_s: float | None = None,
) -> Iterator[None]:
    """The process group of the processes that torchrun or srun started, as a context.

    Args:
        backend: "gloo" or "nccl".
        threads: torch threads of this process; default: cores over processes of this host.
        world: take part only in the first `world` processes; default: all.
        store: where the processes meet, if they have met already.
        hang_s: `train.hang_s` of the run.
    """
    found = launched_rank()
    if found is None:
        raise RuntimeError("neither torchrun nor srun started this process")
    rank, size, local_rank = found
    store, world = store or rendezvous_store(), world or size
    with enter_rank(
        backend,
        rank,
        world,
        local_rank,
        local_world_size(),
        threads,
        store,
        hang_s=hang_s,
        run=None if on_one_host() else (store, rank, world),
    ):
        yield


def wait_as_spare(store: dist.Store, rank: int, size: int) -> bool:
    """For a rank of `size` without a part: wait until the run ends; whether it was stopped. Exits
    if the run fails."""
    told = threading.Event()
    try:
        with on_stop_signal(told.set):
            while not told.is_set() and not store.check(["weft/left/0"]):
                time.sleep(POLL_S)
        stopped = told.is_set() or store.get("weft/left/0") == b"stopped"
        leave_world(store, rank, size, stopped)
    except dist.DistError:
        raise SystemExit(
            1
        ) from None  # the first rank has gone without a word: a failure, told by who failed
    return stopped


def leave_world(store: dist.Store, rank: int, size: int, stopped: bool = False) -> None:
    """Tell the other ranks that this one is done. Rank 0, which may keep the store, waits a while
    for the others.

    Args:
        store: where the ranks meet.
        rank: this rank.
        size: how many ranks there are.
        stopped: the run was stopped before its last step.
    """
    with suppress(dist.DistError) if rank else nullcontext():  # rank 0 may have waited long enough
        store.set(f"weft/left/{rank}", "stopped" if stopped else "")
        # an answer shows that the word has arrived: this process's gate ends with it
        store.check([f"weft/left/{rank}"])
    since = time.monotonic()
    while rank == 0 and time.monotonic() - since < TIMEOUT_S:
        if all(store.check([f"weft/left/{other}"]) for other in range(size)):
            break
        time.sleep(POLL_S)


# ---- in the parent -------------------------------------------------------------------------------


def _context(backend: Backend, start: StartMethod | None = None) -> BaseContext:
    if start is not None:
        return multiprocessing.get_context(start)
    forks = sys.platform == "linux" and backend == "gloo" and not torch.cuda.is_initialized()
    if forks and autograd_survives_fork():
        return multiprocessing.get_context("fork")
    return multiprocessing.get_context("spawn")


def _release_threads() -> None:
    """End this thread's OpenMP threads: a forked child would wait for them for ever. They come back
    when needed."""
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if re.search(r"/lib[gi]?omp[^/]*\.so", line)}
    for library in libraries:
        ctypes.CDLL(library).omp_pause_resource_all(1)  # soft: settings stay


@contextmanager
def replica_store() -> Iterator[tuple[dist.TCPStore, BaseProcess]]:
    """Where replicas that are worlds of their own meet, and the process that keeps it: the store's
    thread would hold locks when this process forks, and the fork would wait for them for ever."""
    here, theirs = multiprocessing.Pipe()
    keeper = _context("gloo").Process(target=_keep, args=(theirs, os.getpid()))  # type: ignore[attr-defined]
    keeper.start()
    theirs.close()
    try:
        port, patience = here.recv(), timedelta(seconds=STORE_S)
        yield join_store(LOOPBACK, port, patience), keeper
    finally:
        keeper.kill()
        keeper.join()
        here.close()


def _keep(connection: Connection, parent: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it is needed until the ranks have ended
    store = keep_store()
    connection.send(store.port)
    follow_parent(parent)


class WorkerProcess:
    """A process and this end of the connection to it."""

    def __init__(
        self, backend: Backend, task: RankTask | None = None, start: StartMethod | None = None
    ):
        context = _context(backend, start)
        if context.get_start_method() == "fork":
            _release_threads()
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve_tasks, args=(theirs, os.getpid(), task))  # type: ignore[attr-defined]
        self.process.start()
        theirs.close()

    def answer(self) -> TaskResult | TaskFailure | None:
        """What the process has answered, or how it died; None if it is still at work."""
        died = (
            self.process.exitcode is not None
        )  # asked first: an answer sent just before the end is still read
        try:
            if self.connection.poll():
                return _read_answer(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.join(END_S)
            died = True
        if not died:
            return None
        code = self.process.exitcode
        how = (
            f"killed by {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"exited with code {code}"
        )
        # An abort is often a consequence: a library's own end when its peer is gone.
        return TaskFailure(time.monotonic() if code == -signal.SIGABRT else 0.0, how)


def _read_answer(message: bytes) -> TaskResult | TaskFailure:
    try:
        answer: TaskResult | TaskFailure = pickle.loads(message)
    except Exception as error:  # what a rank returned may be of a class that this process lacks
        return UnsendableResult.by(error)
    return answer


class WorldWatch:
    """The ranks of one world at one task. `ranks`: their numbers in what is said of them, and
    `names`; `stacks`: the files in which those that hang say where."""

    def __init__(
        self,
        workers: Sequence[WorkerProcess],
        timeout: float | None = None,
        ranks: Sequence[int] | None = None,
        stacks: Sequence[str] = (),
        names: Sequence[str] = (),
    ):
        self._stacks, self._timeout, self._names = stacks, timeout, names
        self._ranks = ranks if ranks is not None else range(len(workers))
        self._results: dict[int, Any] = {}
        self._failed: dict[int, TaskFailure] = {}
        self._waiting = dict(enumerate(workers))
        self._deadline = None if timeout is None else time.monotonic() + timeout + GRACE_S

    def events(self) -> list[Any]:
        """What to wait for."""
        return [x for w in self._waiting.values() for x in (w.connection, w.process.sentinel)]

    def over(self) -> bool:
        """Take in what has been answered; whether there is nothing more to wait for."""
        for rank, worker in list(self._waiting.items()):
            answer = worker.answer()
            if isinstance(answer, TaskResult):
                self._results[rank] = answer.result
            elif isinstance(answer, TaskFailure):
                self._failed[rank] = answer
            if answer is not None:
                del self._waiting[rank]
        now = time.monotonic()
        if self._failed and (self._deadline is None or self._deadline > now + GRACE_S):
            self._deadline = now + GRACE_S
        return not self._waiting or (self._deadline is not None and now > self._deadline)

    def results(self) -> list[Any]:
        """In rank order. Raises the error of the rank that failed first."""
        if self._failed:
            rank = min(self._failed, key=lambda r: self._failed[r].when)
            raise self._failed[rank].error(
                self._ranks[rank], self._names[rank] if self._names else ""
            )
        if self._waiting:
            stacks = [(rank, Path(self._stacks[rank])) for rank in self._waiting]
            places = [
                f"\nrank {rank} is at\n{stack.read_text(encoding='utf-8')}"
                for rank, stack in stacks
                if stack.exists()
            ]
            raise WorkerDied(
                min(self._waiting), f"no answer within {self._timeout} s{''.join(places)}"
            )
        return [self._results[rank] for rank in range(len(self._ranks))]


def _collect(watch: WorldWatch) -> list[Any]:
    while not watch.over():
        wait(watch.events(), timeout=POLL_S)
    return watch.results()


@contextmanager
def pass_on_stop(workers: Sequence[WorkerProcess]) -> Iterator[threading.Event]:
    """Pass on to these workers that the run is to stop; the event is then set."""
    came = threading.Event()

    def forward() -> None:
        came.set()
        for worker in workers:
            worker.process.terminate()

    with on_stop_signal(forward):
        yield came


def end_workers(workers: Sequence[WorkerProcess]) -> None:
    """End what still runs, gently and then not."""
    for worker in workers:
        if worker.process.is_alive():
            worker.process.terminate()
    deadline = time.monotonic() + END_S
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.connection.close()


# ---- in a rank -----------------------------------------------------------------------------------
