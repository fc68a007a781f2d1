"""The processes of this host, one per rank: started, watched and ended by their parent.

    run(function, world, *args)     as many processes as ranks, for one task
    Pool(world).run(function, ...)  the same processes for many tasks, each in a fresh process group
    join(backend)                   this process is a rank already: torchrun or srun started it

Ranks meet through a file, so no port is guessed. If a rank fails, the parent ends the others and raises the error of
the one that failed first. Ranks end if the parent dies.

On Linux ranks are forked: they start in milliseconds and inherit what the parent has imported. CUDA does not survive a
fork, so ranks that use it are spawned, as are those on other systems; their function and arguments are pickled.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist

from ..errors import Refusal, WeftError, WorkerDied
from .environment import environment, local_world, rendezvous

Backend = Literal["gloo", "nccl"]

POLL_S = 0.2
GRACE_S = 0.5  # after the first failure: a killed peer is seen later than the errors of those that lost it
END_S = 1.0  # from SIGTERM to SIGKILL
STACK = 6  # innermost calls shown of a rank that hangs


def run(
    function: Callable[..., Any], world: int, *args: Any, threads: int | None = None, backend: Backend = "gloo"
) -> list[Any]:
    """`function(*args)` in `world` processes, inside a process group; the results in rank order.

    `threads`: torch threads of each process (cores // world if left out). Raises WorkerDied with the error of the rank
    that failed first; a Refusal raised by a rank is raised as it is. A SIGTERM is passed on to the ranks, so that they
    can end in order.
    """
    folder = tempfile.mkdtemp(prefix="weft-")
    file = os.path.join(folder, "store")
    workers: list[_Worker] = []
    try:
        with _sigterm_for(workers):
            for rank in range(world):
                workers.append(_Worker(backend, _Task(function, args, rank, world, file, backend, threads)))
            return _collect(workers, file)
    finally:
        _end(workers)
        shutil.rmtree(folder, ignore_errors=True)


class Pool:
    """`world` processes kept alive for many tasks. A context manager.

    Functions and arguments are pickled: name functions at the top of a module. After a task that failed, the processes
    that ran it are replaced.
    """

    def __init__(self, world: int, threads: int | None = 1, backend: Backend = "gloo"):
        # What DTensor loads at its first use, too: once here, and not in every process.
        importlib.import_module("torch.distributed.tensor.debug")
        self._threads, self._backend, self._tasks = threads, backend, 0
        self._folder = tempfile.mkdtemp(prefix="weft-")
        self._workers = [_Worker(backend) for _ in range(world)]

    def run(
        self, function: Callable[..., Any], *args: Any, world: int | None = None, timeout: float | None = None
    ) -> list[Any]:
        """`function(*args)` on the first `world` processes (all if left out); the results in rank order.

        After `timeout` seconds WorkerDied says where every rank hangs. Errors as of `run`.
        """
        world = len(self._workers) if world is None else world
        if not 1 <= world <= len(self._workers):
            raise ValueError(f"{world} ranks in a pool of {len(self._workers)} processes")
        for index, worker in enumerate(self._workers):
            if worker.process.exitcode is not None:  # ended from outside since the last task
                self._workers[index] = _Worker(self._backend)
        self._tasks += 1
        file = os.path.join(self._folder, str(self._tasks))
        messages = [
            pickle.dumps(_Task(function, args, rank, world, file, self._backend, self._threads, timeout))
            for rank in range(world)
        ]
        try:
            for worker, message in zip(self._workers, messages, strict=False):
                worker.connection.send_bytes(message)
            return _collect(self._workers[:world], file, timeout)
        except BaseException:
            _end(self._workers[:world])
            self._workers[:world] = [_Worker(self._backend) for _ in range(world)]
            raise

    def close(self) -> None:
        """End the processes."""
        _end(self._workers)
        self._workers = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def join(backend: Backend = "gloo", threads: int | None = None) -> Iterator[None]:
    """The process group of the processes that torchrun or srun started, of which this is one; see `environment`."""
    found = environment()
    if found is None:
        raise RuntimeError("neither torchrun nor srun started this process")
    host, port = rendezvous()
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    rank, world, local_rank = found
    _enter(backend, rank, world, local_rank, local_world(), threads)
    yield
    _leave()  # not after an error: peers that are gone would be waited for


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


# ---- in the parent -------------------------------------------------------------------------------------------------


def _context(backend: Backend) -> BaseContext:
    if sys.platform == "linux" and backend == "gloo" and not torch.cuda.is_initialized():
        return multiprocessing.get_context("fork")
    return multiprocessing.get_context("spawn")


def _release_threads() -> None:
    """End this thread's OpenMP threads: a forked child would wait for them for ever. They come back when needed."""
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if re.search(r"/lib[gi]?omp[^/]*\.so", line)}
    for library in libraries:
        ctypes.CDLL(library).omp_pause_resource_all(1)  # soft: settings stay


class _Worker:
    """A process and this end of the connection to it."""

    def __init__(self, backend: Backend, task: _Task | None = None):
        context = _context(backend)
        if context.get_start_method() == "fork":
            _release_threads()
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, os.getpid(), task))  # type: ignore[attr-defined]
        self.process.start()
        theirs.close()

    def answer(self) -> _Done | _Failed | None:
        """What the process has answered, or how it died; None if it is still at work."""
        died = self.process.exitcode is not None  # asked first: an answer sent just before the end is still read
        try:
            if self.connection.poll():
                return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.join(END_S)
            died = True
        if not died:
            return None
        code = self.process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with code {code}"
        # An abort is often a consequence: a library's own end when its peer is gone.
        return _Failed(time.monotonic() if code == -signal.SIGABRT else 0.0, how)


def _collect(workers: Sequence[_Worker], file: str, timeout: float | None = None) -> list[Any]:
    """The results in rank order, or the error of the rank that failed first. `file` is where the ranks meet."""
    results: dict[int, Any] = {}
    failed: dict[int, _Failed] = {}
    waiting = dict(enumerate(workers))
    deadline = None if timeout is None else time.monotonic() + timeout + GRACE_S
    while waiting:
        wait([x for w in waiting.values() for x in (w.connection, w.process.sentinel)], timeout=POLL_S)
        for rank, worker in list(waiting.items()):
            answer = worker.answer()
            if isinstance(answer, _Done):
                results[rank] = answer.result
            elif isinstance(answer, _Failed):
                failed[rank] = answer
            if answer is not None:
                del waiting[rank]
        now = time.monotonic()
        if failed and (deadline is None or deadline > now + GRACE_S):
            deadline = now + GRACE_S
        if waiting and deadline is not None and now > deadline:
            break
    if failed:
        rank = min(failed, key=lambda r: failed[r].when)
        raise failed[rank].error(rank)
    if waiting:
        stacks = [(rank, Path(_stack_file(file, rank))) for rank in waiting]
        places = [
            f"\nrank {rank} is at\n{stack.read_text(encoding='utf-8')}" for rank, stack in stacks if stack.exists()
        ]
        raise WorkerDied(min(waiting), f"no answer within {timeout} s{''.join(places)}")
    return [results[rank] for rank in range(len(workers))]


@contextmanager
def _sigterm_for(workers: Sequence[_Worker]) -> Iterator[None]:
    """Pass SIGTERM on to these workers."""
    if threading.current_thread() is not threading.main_thread():  # Python lets no other thread handle signals
        yield
        return

    def forward(number: int, frame: FrameType | None) -> None:
        for worker in workers:
            worker.process.terminate()

    before = signal.signal(signal.SIGTERM, forward)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(workers: Sequence[_Worker]) -> None:
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


# ---- in a rank -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Done:
    result: Any


@dataclass(frozen=True)
class _Failed:
    """`when` by the host's clock (0: before all that peers report); `refusal`: its type, arguments and attributes."""

    when: float
    report: str
    refusal: tuple[type[Refusal], tuple, dict[str, Any]] | None = None

    @classmethod
    def by(cls, error: BaseException) -> _Failed:
        refusal = None
        if isinstance(error, Refusal):  # its fields become text: a value may be anything
            fields = {key: x if isinstance(x, int | float | None) else str(x) for key, x in vars(error).items()}
            refusal = type(error), error.args, fields
        said = str(error) if isinstance(error, WeftError) else "".join(traceback.format_exception(error))
        return cls(time.monotonic(), said, refusal)

    def error(self, rank: int) -> Exception:
        if self.refusal is None:
            return WorkerDied(rank, self.report)
        kind, args, fields = self.refusal
        error = kind.__new__(kind, *args)
        error.__dict__.update(fields)
        return error


@dataclass(frozen=True)
class _Task:
    """One rank's part of one task. `file` is where its ranks meet."""

    function: Callable[..., Any]
    args: tuple
    rank: int
    world: int
    file: str
    backend: Backend
    threads: int | None
    timeout: float | None = None

    def __call__(self) -> Any:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # for who asks; nobody listens there
        store = dist.FileStore(self.file, self.world)
        alarm = threading.Timer(self.timeout or 0.0, _note_stack, (threading.get_ident(), self.file, self.rank))
        alarm.daemon = True
        if self.timeout is not None:
            alarm.start()
        _enter(self.backend, self.rank, self.world, self.rank, self.world, self.threads, store)
        result = self.function(*self.args)
        _leave()
        alarm.cancel()
        return result


def _stack_file(file: str, rank: int) -> str:
    return f"{file}.{rank}"


def _note_stack(thread: int, file: str, rank: int) -> None:
    """Write where this thread is, innermost last."""
    stack = traceback.format_stack(sys._current_frames()[thread])
    Path(_stack_file(file, rank)).write_text("".join(stack[-STACK:]), encoding="utf-8")


def _enter(
    backend: Backend,
    rank: int,
    world: int,
    local_rank: int,
    neighbours: int,
    threads: int | None,
    store: dist.Store | None = None,
) -> None:
    """Make this process a rank, one of `neighbours` on this host; without a store they meet at MASTER_ADDR."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(neighbours)
    )
    torch.set_num_threads(threads or max(1, cores() // neighbours))
    if backend == "gloo":
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        return
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=world, device_id=device)


def _leave() -> None:
    """Be no rank any more, once all ranks are done: some may still be connecting, or need the store of the first."""
    dist.barrier()
    dist.destroy_process_group()


def _work(connection: Connection, parent: int, task: _Task | None) -> None:
    """A worker's life: `task`, or every task that comes over the connection."""
    gc.freeze()  # the parent's garbage is not this process's to collect: destructors may join threads or delete files
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    if task is not None:
        connection.send_bytes(_answer(task))
        return
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        answer = _answer(lambda message=message: pickle.loads(message)())  # type: ignore[misc]
        # DTensor caches by mesh, and a mesh of the next task may equal one of this task, whose groups are gone.
        _clear_sharding_prop_cache()
        gc.collect()  # an engine is a cycle, and holds process groups with their threads
        connection.send_bytes(answer)


def _answer(task: Callable[[], Any]) -> bytes:
    # Plain pickle: multiprocessing's own would pass tensors as handles that die with this process.
    try:
        return pickle.dumps(_Done(task()))
    except BaseException as error:
        return pickle.dumps(_Failed.by(error))


def _follow(parent: int) -> None:
    """End this process when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(1)
