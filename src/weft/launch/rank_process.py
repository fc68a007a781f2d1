"""What the process of a rank runs: it joins its world, executes tasks, ends with its parent."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft._torch.compiler import forget_compile_threads
from weft.core import Refusal, WeftError, WorkerDied, fault_of, told_fault
from weft.engine import ReplicaGroup

from .choose_backend import Backend
from .environment import AGENT, launched_rank, master_address, on_one_host, restart_count
from .gate import LOOPBACK, run_token
from .host_filter import admit_hosts
from .rendezvous import Rendezvous, listen_at
from .stores import join_hosts_store, join_store, keep_for_hosts, keep_store
from .thread_frame import thread_frame
from .watchdog import Watchdog

POLL_S = 0.2


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


STACK = 6  # innermost calls shown of a rank that hangs


@dataclass(frozen=True)
class TaskResult:
    result: Any


@dataclass(frozen=True)
class TaskFailure:
    """`when` by the host's clock (0: before all that peers report); `refusal`: its type, arguments
    and attributes; `meant`: weft raised it; `fault`: on one line, if code of the user's did."""

    when: float
    report: str
    refusal: tuple[type[Refusal], tuple, dict[str, Any]] | None = None
    meant: bool = False
    fault: str = ""

    @classmethod
    def by(cls, error: BaseException) -> TaskFailure:
        refusal = None
        if isinstance(error, Refusal):  # its fields become text: a value may be anything
            fields = {
                key: x if isinstance(x, int | float | None) else str(x)
                for key, x in vars(error).items()
            }
            refusal = type(error), error.args, fields
        if isinstance(error, WeftError):
            return cls(time.monotonic(), str(error), refusal, meant=True)
        said = "".join(traceback.format_exception(error))
        fault = told_fault(error) if fault_of(error)[1] else ""
        return cls(time.monotonic(), said, fault=fault)

    def error(self, rank: int, name: str) -> Exception:
        if self.refusal is None:
            return WorkerDied(rank, self.report, self.meant, name, self.fault)
        kind, args, fields = self.refusal
        error = kind.__new__(kind, *args)
        error.__dict__.update(fields)
        return error


class UnsendableResult(TaskFailure):
    """What a task returned cannot be pickled by its rank, or be read by the parent."""

    def error(self, rank: int, name: str) -> Exception:
        who = WorkerDied(rank, self.report, name=name).who
        return WeftError(
            f"what {who} returned cannot be sent back ({self.report}): return numbers, tensors or"
            " texts, or save a checkpoint"
        )

    @classmethod
    def by(cls, error: BaseException) -> UnsendableResult:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return cls(time.monotonic(), said, meant=True)


@dataclass(frozen=True)
class RankTask:
    """One rank's part of one task. `file` is where the ranks of its world meet, `seat` what the
    world is among others; after `timeout` seconds `stack` says where it is. `hang_s`: as of
    `enter_rank`."""

    function: Callable[..., Any]
    args: tuple
    rank: int
    world: int
    file: str
    backend: Backend
    threads: int | None
    timeout: float | None = None
    stack: str = ""
    seat: WorkerSlot | None = None
    hang_s: float | None = None

    def __call__(self) -> Any:
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
        )  # for who asks; nobody listens there
        listen_at(LOOPBACK)
        store = dist.FileStore(self.file, self.world)
        alarm = threading.Timer(
            self.timeout or 0.0, _note_stack, (threading.get_ident(), self.stack)
        )
        alarm.daemon = True
        if self.timeout is not None:
            alarm.start()
        neighbours = self.world if self.seat is None else self.seat.neighbours
        company = None if self.seat is None else self.seat.company()
        with enter_rank(
            self.backend,
            self.rank,
            self.world,
            self.rank,
            neighbours,
            self.threads,
            store,
            company,
            self.hang_s,
        ):
            result = self.function(*self.args)
        alarm.cancel()
        return result


@dataclass(frozen=True)
class WorkerSlot:
    """What a world is among replicas on this host that are worlds of their own: `port` is that of
    the store where they meet; `neighbours` counts the ranks of all of them."""

    port: int
    replica: int
    incarnation: int
    neighbours: int

    def company(self) -> ReplicaGroup:
        return ReplicaGroup(join_store(LOOPBACK, self.port), self.replica, self.incarnation)


_COMPANY: list[ReplicaGroup] = []  # of this process, if it has any


def replica_slot() -> ReplicaGroup | None:
    """Where this process stands among replicas that are worlds of their own; None where all ranks
    are in one world."""
    return _COMPANY[0] if _COMPANY else None


def _note_stack(thread: int, file: str) -> None:
    """Write where this thread is, innermost last."""
    stack = traceback.format_stack(thread_frame(thread))
    Path(file).write_text("".join(stack[-STACK:]), encoding="utf-8")


def rendezvous_store() -> dist.Store:
    """Where all processes that torchrun, srun or an agent of weft started meet: rank 0 keeps it,
    unless the agents do. Raises ConfigError: several hosts, and no token of the run."""
    host, port = master_address()
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    found = launched_rank()
    assert found is not None
    if AGENT in os.environ:  # which has chosen the interface
        return join_store(host, port)
    meeting = Rendezvous(host, port)
    address = LOOPBACK if on_one_host() else meeting.address()
    listen_at(address)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun keeps its store when it starts processes anew, and with it the addresses of those
        # that died
        return dist.PrefixStore(f"attempt-{restart_count()}", join_store(host, port))
    rank, size, _ = found
    if on_one_host():
        return join_store(LOOPBACK, port) if rank else keep_store(LOOPBACK, port)
    token = run_token(address)
    if rank:
        return join_hosts_store(meeting, address, token)
    return keep_for_hosts(meeting, address, token, guests=size)


@contextmanager
def enter_rank(
    backend: Backend,
    rank: int,
    world: int,
    local_rank: int,
    neighbours: int,
    threads: int | None,
    store: dist.Store,
    company: ReplicaGroup | None = None,
    hang_s: float | None = None,
    run: tuple[dist.Store, int, int] | None = None,
) -> Iterator[None]:
    """This process is a rank, one of `neighbours` on this host, until all ranks are done: some may
    still be connecting, or need the store of the first. It ends if they do not all connect; within
    how long follows from `hang_s`, as in `Watchdog`. `run`, over several hosts: the store, this
    rank and the number of ranks of the whole run, of which this world may be a part."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(neighbours),
    )
    os.environ.setdefault(
        "TORCH_FR_BUFFER_SIZE", "2000"
    )  # collectives that the flight recorder remembers
    # torch's own way to say it; but torchrun says 1 where nobody has
    asked = (
        os.environ.get("OMP_NUM_THREADS", "")
        if "TORCHELASTIC_RUN_ID" not in os.environ or AGENT in os.environ
        else ""
    )
    torch.set_num_threads(
        threads
        or (int(asked) if asked.isdigit() and int(asked) else max(1, usable_cores() // neighbours))
    )
    with Watchdog(hang_s, (store, rank, world)) as start, start.starting():
        if run is not None:
            admit_hosts(*run)
        if backend == "gloo":
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        else:
            device = torch.device("cuda", local_rank)
            torch.cuda.set_device(device)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=world, device_id=device
            )
    _COMPANY[:] = [] if company is None else [company]
    yield
    dist.barrier()  # not after an error: peers that are gone would be waited for
    dist.destroy_process_group()


def serve_tasks(connection: Connection, parent: int, task: RankTask | None) -> None:
    """A worker's life: `task`, or every task that comes over the connection."""
    # the parent's garbage is not this process's to collect: destructors may join threads or delete
    # files
    gc.freeze()
    forget_compile_threads()
    for number in (signal.SIGINT, signal.SIGHUP):  # they reach the whole group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=follow_parent, args=(parent,), daemon=True).start()
    if task is not None:
        connection.send_bytes(_answer(task))
        return
    from weft._torch.tensors import forget_meshes

    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        answer = _answer(lambda message=message: pickle.loads(message)())  # type: ignore[misc]
        # DTensor caches by mesh, and a mesh of the next task may equal one of this task, whose
        # groups are gone.
        forget_meshes()
        gc.collect()  # an engine is a cycle, and holds process groups with their threads
        connection.send_bytes(answer)


def _answer(task: Callable[[], Any]) -> bytes:
    # Plain pickle: multiprocessing's own would pass tensors as handles that die with this process.
    try:
        result = task()
    except BaseException as error:
        return pickle.dumps(TaskFailure.by(error))
    try:
        return pickle.dumps(TaskResult(result))
    except Exception as error:  # a class may fail in any way to be pickled
        return pickle.dumps(UnsendableResult.by(error))


def follow_parent(parent: int) -> None:
    """End this process when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(1)
