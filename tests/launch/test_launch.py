from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from weft.core.errors import LayoutError, WeftError, WorkerDied
from weft.engine.replica_sync.membership import Membership
from weft.launch import environment, rank_process, replica_workers
from weft.launch.local_workers import Pool, join_world, run_workers

SOON_S = 8.0  # "within seconds", on a busy machine


@contextmanager
def soon() -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < SOON_S


def total(start: float) -> torch.Tensor:
    value = torch.full((2,), start + dist.get_rank())
    dist.all_reduce(value)
    return value


def raise_in_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the tea is cold")
    dist.all_reduce(torch.zeros(1))


def kill_rank_2() -> None:
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def exit_in_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.all_reduce(torch.zeros(1))


def leave_rank_1_out() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.all_reduce(torch.zeros(1))


def refuse_in_rank_1() -> None:
    if dist.get_rank() == 1:
        raise LayoutError("layout", lambda: "no pickle takes me", "does not fit", "use dp2")
    dist.all_reduce(torch.zeros(1))


# ---- run -----------------------------------------------------------------------------------------


def test_results_come_in_rank_order_and_ranks_know_where_they_are() -> None:
    before = dict(os.environ)

    def where() -> tuple:  # not picklable: forked ranks inherit it
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        assert dist.get_rank() == int(os.environ["RANK"])
        return *(os.environ[name] for name in names), torch.get_num_threads(), dist.get_backend()

    assert run_workers(where, 3, threads=2) == [
        (str(r), str(r), "3", "3", "127.0.0.1", 2, "gloo") for r in range(3)
    ]
    assert dict(os.environ) == before
    assert [t.tolist() for t in run_workers(total, 2, 1.5)] == [[4.0, 4.0]] * 2


@pytest.mark.parametrize(
    ("function", "rank", "report"),
    [
        (raise_in_rank_1, 1, "ValueError: the tea is cold"),
        (kill_rank_2, 2, "killed by SIGKILL"),
        (exit_in_rank_1, 1, "exited with code 3"),
    ],
)
def test_the_first_failure_ends_the_run(
    function: Callable[[], None], rank: int, report: str
) -> None:
    with soon(), pytest.raises(WorkerDied) as caught:
        run_workers(function, 3)
    assert caught.value.rank == rank
    assert caught.value.report.strip().endswith(report)
    assert caught.value.report.count("Traceback") <= 1


def test_a_failing_rank_ends_peers_that_are_stuck() -> None:
    def stuck() -> None:
        if dist.get_rank() == 0:
            raise ValueError("first")
        time.sleep(600)

    children = set(multiprocessing.active_children())
    with soon(), pytest.raises(WorkerDied, match="first"):
        run_workers(stuck, 3)
    assert set(multiprocessing.active_children()) <= children


def test_a_refusal_travels_as_itself() -> None:
    with soon(), pytest.raises(LayoutError) as caught:
        run_workers(refuse_in_rank_1, 2)
    error = caught.value
    assert (error.field, error.problem, error.fix) == ("layout", "does not fit", "use dp2")
    assert "does not fit" in str(error)


def test_a_result_that_cannot_travel_is_that_ranks_error() -> None:
    with pytest.raises(WeftError, match=r"what rank 0 returned cannot be sent back .*pickle"):
        run_workers(lambda: lambda: 0, 1)


def multiply() -> float:
    a = torch.ones(400, 400, requires_grad=True)
    (a @ a).exp().mean().backward()
    return float(a.detach().sum())


def test_ranks_compute_on_many_threads_though_the_parent_did() -> None:
    torch.set_num_threads(2)
    try:
        multiply()
        with Pool(1, threads=2) as pool:
            assert pool.run(multiply, timeout=20) == [400.0**2]
    finally:
        torch.set_num_threads(1)


# ---- the end of the parent -----------------------------------------------------------------------


def compiled_sum(size: int) -> float:
    return float(torch.compile(lambda x: x.sin().sum(), dynamic=False)(torch.ones(size)))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_ranks_compile_though_the_parent_did() -> None:
    """The threads that inductor compiles in do not come along into a forked process."""
    size = 10**5 + time.time_ns() % 10**5  # what a run has cached does not do for the next
    compiled_sum(size)
    with Pool(1) as pool:
        found = pool.run(compiled_sum, size + 1, timeout=120)
    assert found == [pytest.approx((size + 1) * math.sin(1), rel=1e-4)]


def note_pid_and_sleep(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    time.sleep(60)


def parent(folder: Path) -> None:
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # where tests run in the background it is ignored
    tempfile.tempdir = str(folder.parent)  # a killed parent leaves its files behind
    run_workers(note_pid_and_sleep, 2, folder)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ranks_end_with_their_parent(tmp_path: Path, number: signal.Signals) -> None:
    process = multiprocessing.get_context("fork").Process(target=parent, args=(tmp_path,))
    process.start()
    assert process.pid is not None
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    ranks = [int(path.name) for path in tmp_path.iterdir()]
    assert all(map(alive, ranks))
    os.kill(process.pid, number)
    process.join(SOON_S)
    assert process.exitcode is not None
    wait_until(lambda: not any(map(alive, ranks)))


def end_in_order() -> str:
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    wait_until(lambda: bool(asked))
    return "in order"


def test_sigterm_is_passed_on_to_the_ranks() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with soon():
        assert run_workers(end_in_order, 2) == ["in order"] * 2
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_error_raised_on_purpose_comes_without_its_traceback() -> None:
    def purpose() -> None:
        raise WeftError("the loss is nan")

    with pytest.raises(WorkerDied) as caught:
        run_workers(purpose, 1)
    assert caught.value.report == "the loss is nan"


# ---- the pool ------------------------------------------------------------------------------------


def pid() -> int:
    return os.getpid()


def multiply_sharded(extra_groups: int) -> float:
    for _ in range(extra_groups):
        dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    a = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    b = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
    return float((a @ b).redistribute(mesh, [Replicate()]).to_local().sum())


def test_the_pool_keeps_its_processes(pool: Pool) -> None:
    pids = pool.run(pid)
    assert len(set(pids)) == 4
    assert pool.run(pid, world=2) == pids[:2]
    assert [t.tolist() for t in pool.run(total, 1.0, world=2)] == [[3.0, 3.0]] * 2
    assert [t.tolist() for t in pool.run(total, 1.0)] == [[10.0, 10.0]] * 4
    assert pool.run(pid) == pids


def test_meshes_of_one_task_do_not_reach_into_the_next(pool: Pool) -> None:
    assert pool.run(multiply_sharded, 0) == [64.0] * 4
    assert pool.run(multiply_sharded, 3) == [64.0] * 4
    assert pool.run(multiply_sharded, 1) == [64.0] * 4


@pytest.mark.parametrize(
    ("function", "says"),
    [(raise_in_rank_1, "the tea is cold"), (kill_rank_2, "SIGKILL"), (exit_in_rank_1, "code 3")],
)
def test_the_pool_outlives_a_task_that_fails(
    pool: Pool, function: Callable[[], None], says: str
) -> None:
    with soon():
        with pytest.raises(WorkerDied, match=says):
            pool.run(function, world=3)
        assert pool.run(total, 0.0)[0].tolist() == [6.0, 6.0]


def test_the_pool_outlives_a_refusal(pool: Pool) -> None:
    with soon():
        with pytest.raises(LayoutError, match="does not fit"):
            pool.run(refuse_in_rank_1)
        assert pool.run(total, 0.0)[0].tolist() == [6.0, 6.0]


def test_the_pool_outlives_a_hang(pool: Pool) -> None:
    with soon():
        with pytest.raises(WorkerDied, match=r"no answer within 1\.0 s") as caught:
            pool.run(leave_rank_1_out, world=3, timeout=1.0)
        assert pool.run(total, 0.0)[0].tolist() == [6.0, 6.0]
    for rank, place in enumerate(("dist.all_reduce", "time.sleep", "dist.all_reduce")):
        stack = caught.value.report.split(f"rank {rank} is at")[1].split("is at")[0]
        assert place in stack


def test_a_process_that_ended_between_tasks_is_replaced(pool: Pool) -> None:
    victim = pool.run(pid)[1]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: not alive(victim))
    time.sleep(0.3)  # its threads end after its main thread is seen to
    assert victim not in pool.run(pid)


def test_a_pool_has_only_so_many_processes(pool: Pool) -> None:
    with pytest.raises(ValueError, match="5 ranks in a pool of 4"):
        pool.run(pid, world=5)


# ---- launchers -----------------------------------------------------------------------------------


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher in the environment."""
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
        ):
            monkeypatch.delenv(name)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    return monkeypatch


SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "40123",
    "SLURM_JOB_NODELIST": "gpu[003-004],big",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}


def test_who_started_this_process(bare: pytest.MonkeyPatch) -> None:
    assert environment.launched_rank() is None
    for name, value in SRUN.items():
        bare.setenv(name, value)
    assert environment.launched_rank() == (5, 8, 1)
    assert environment.local_world_size() == 4
    assert environment.master_address() == ("gpu003", 20123)
    bare.delenv("SLURM_STEP_ID")  # a batch script, not srun: nobody started seven others
    assert environment.launched_rank() is None
    for name, value in {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }.items():
        bare.setenv(name, value)
    bare.setenv("MASTER_ADDR", "head")
    bare.setenv("MASTER_PORT", "29501")
    assert environment.launched_rank() == (3, 4, 1)
    assert environment.local_world_size() == 2
    assert environment.master_address() == ("head", 29501)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node7", "node7"),
        ("a,b", "a"),
        ("gpu[003-010,12]", "gpu003"),
        ("gpu[5,7-9],login", "gpu5"),
        ("rack1-n[01-04]-ib,x[1-2]", "rack1-n01-ib"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodelist: str, host: str) -> None:
    assert environment.first_host(nodelist) == host


def joined(rank: int, launcher: str, port: int, folder: Path) -> None:
    if "srun" in launcher:
        os.environ.update(SRUN, SLURM_PROCID=str(rank), SLURM_NTASKS="2", SLURM_LOCALID=str(rank))
        os.environ.update(SLURM_JOB_NODELIST="127.0.0.1", SLURM_TASKS_PER_NODE="2")
    else:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1"
        )
    os.environ["MASTER_PORT"] = str(port)
    if "apart" in launcher:
        with replica_workers.join_replica("gloo", 1, [[0], [1]]):
            (folder / str(rank)).write_text(f"{dist.get_world_size()} {met(1.0)}")
        return
    with join_world(threads=1):
        (folder / str(rank)).write_text(f"{total(1.0).tolist()} {os.environ['LOCAL_RANK']}")


def met(value: float) -> list[float]:
    """The sum over replicas that are worlds of their own."""
    company, found = rank_process.replica_slot(), torch.tensor([value])
    assert company is not None
    meeting = Membership(company, 2, 0, 1, 20.0).run(
        "a", lambda here: dist.all_reduce(found, group=here.group)
    )
    assert meeting is not None
    assert meeting.members == (0, 1)
    return found.tolist()


@pytest.mark.parametrize("launcher", ["torchrun", "srun", "torchrun apart", "srun apart"])
def test_a_launched_process_joins_its_peers(
    bare: pytest.MonkeyPatch, tmp_path: Path, launcher: str
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = multiprocessing.get_context("fork").Process
    ranks = [start(target=joined, args=(rank, launcher, port, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(30)
    assert [process.exitcode for process in ranks] == [0, 0]
    wants = ["1 [2.0]"] * 2 if "apart" in launcher else ["[3.0, 3.0] 0", "[3.0, 3.0] 1"]
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == wants


def entered(token: str, rank: int, port: int, folder: Path) -> None:
    """A rank that srun started, on a host that others reach."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", WEFT_TOKEN=token)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    rank_process.run_token.__globals__["is_loopback"] = lambda address: False
    try:
        with join_world(threads=1):
            said = str(total(1.0).tolist())
    except WeftError as error:
        said = str(error)
    (folder / str(rank)).write_text(said)


@pytest.mark.parametrize("tokens", [("", ""), ("t" * 16, "t" * 16), ("t" * 16, "u" * 16)])
def test_ranks_of_several_hosts_prove_that_they_know_the_token(
    bare: pytest.MonkeyPatch, tmp_path: Path, tokens: tuple[str, str]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = multiprocessing.get_context("fork").Process
    ranks = [start(target=entered, args=(tokens[i], i, port, tmp_path)) for i in range(2)]
    for process in ranks:
        process.start()
    ranks[1].join(60)
    if tokens[0] != tokens[1]:
        ranks[0].kill()  # it waits for one that knows it
    ranks[0].join(60)
    said = [path.read_text() for path in sorted(tmp_path.iterdir())]
    if tokens[0] != tokens[1]:
        assert (
            len(said) == 1 and "WEFT_TOKEN" in said[0] and "is not the token of the run" in said[0]
        )
    elif tokens[0]:
        assert said == ["[3.0, 3.0]"] * 2
    else:
        assert all("WEFT_TOKEN" in each and "openssl rand -hex 16" in each for each in said)


def test_nobody_started_this_process(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="neither torchrun nor srun"), join_world():
        pass
