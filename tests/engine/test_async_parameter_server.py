"""Asynchronous parameter server: with a bound of 0 it is all-reduce; nobody is ever further ahead
than the bound; a worker that dies stops nobody, and a server that dies stops the run where a
checkpoint goes on."""

from __future__ import annotations

import random
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import weft
from tests.cases import laid, seeded
from tests.engine.test_membership import failing
from tests.engine.test_outer_optimizer import SGD, batches, subject, trained
from tests.engine.test_sync import written
from tests.train.test_trainer import lines, saved
from weft import sync
from weft.core.errors import Refusal, WorkerDied
from weft.core.run_config import SyncConfig
from weft.core.sync import AsyncServers, SyncEveryStep
from weft.engine.replica_sync import async_parameter_server
from weft.launch import replica_workers
from weft.launch.local_workers import Pool
from weft.train import run_checks
from weft.train.trainer import train

pytestmark = pytest.mark.grid
ADAM = partial(torch.optim.Adam, lr=1e-3)


def servers(
    staleness: int | None, count: int = 1, codec: str = "identity", timeout_s: float = 30.0
) -> AsyncServers:
    made = sync.make_sync(
        "parameter_server", codec, servers=count, staleness=1, timeout_s=timeout_s
    )
    assert isinstance(made, AsyncServers)
    return AsyncServers(made.name, made.codec, count, staleness, timeout_s)


@pytest.mark.parametrize(
    ("layout", "count"),
    [("dp2", 1), ("dp2", 2), ("dp4", 3), ("dp2.tp2", 2), ("dp2.fsdp2", 1), ("dp2.pp2", 2)],
)
def test_without_staleness_it_is_all_reduce(pool: Pool, layout: str, count: int) -> None:
    name = "even" if layout.startswith("dp") and "." not in layout else "even decoder"
    world = weft.Layout.parse(layout).world
    found = pool.run(stepped, name, servers(0, count), layout, 5, SGD, world=world)
    want = pool.run(trained, name, None, "dp1", 5, SGD, world=1)[0]
    for got in found:
        assert got
        for key, value in got.items():
            torch.testing.assert_close(
                torch.where(value.isnan(), want[key], value), want[key], rtol=1e-9, atol=1e-12
            )


def stepped(
    name: str, made: Any, layout: str, steps: int, optimizer: Any, delays: int = 0
) -> dict[str, Any]:
    """The weights of this rank's replica after these steps, in which it dawdles."""
    from tests.engine.test_outer_optimizer import gathered

    of = subject(name, made)
    model = seeded(of.build)
    engine = weft.Engine(
        model, laid(of, model, layout), optimizer=optimizer, loss=of.loss, device="cpu"
    )
    chance = random.Random(engine.replicas.index)
    stalest = []
    for batch in batches(of, steps):
        engine.step(engine.local(batch))
        if delays:
            time.sleep(chance.random() * 0.02 * (delays if engine.replicas.index == 1 else 1))
        if engine.replicas.stalest is not None:
            stalest.append(engine.replicas.stalest)
    if delays:
        behind = engine.replicas.stalest
        engine.gather(last=True)
        return {"stalest": behind}
    found = {
        piece.name: gathered(piece) for piece in engine.tensors() if piece.name in engine.params
    }
    engine.gather(last=True)
    return found


def copies_after_steps(made: AsyncServers, layout: str) -> dict[str, list[float]]:
    """Sums of the weights that each rank has whole, after steps in which its pushes dawdle."""
    of = subject("even decoder", made)
    model = seeded(of.build)
    plan = laid(of, model, layout)
    engine = weft.Engine(model, plan, optimizer=SGD, loss=of.loss, device="cpu")
    engine.connect()
    worker, chance = engine.replicas.worker, random.Random(dist.get_rank())
    push = worker.step

    def late(grads: dict[str, Tensor], rates: dict[str, float]) -> None:
        time.sleep(0.03 * chance.random())
        push(grads, rates)

    worker.step = late
    for batch in batches(of, 6):
        engine.step(engine.local(batch))
    found = {n: p.detach().flatten().tolist() for n, p in engine.params.items() if "norm" in n}
    engine.gather(last=True)
    return found


@pytest.mark.parametrize("layout", ["dp2.tp2", "dp2.cp2"])
def test_copies_within_a_replica_stay_equal(pool: Pool, layout: str) -> None:
    found = pool.run(copies_after_steps, servers(None, 2), layout, world=4)
    replicas = weft.Layout.parse(layout).replicas()
    assert found[0]
    for first, second in replicas:
        assert found[first] == found[second]


@pytest.mark.grid(2)
@pytest.mark.parametrize("staleness", [0, 1, 3, None])
def test_nobody_is_further_ahead_than_the_bound(pool: Pool, staleness: int | None) -> None:
    found = pool.run(stepped, "even", servers(staleness, 2), "dp4", 25, SGD, 6, world=4)
    stalest = max(each["stalest"] for each in found)
    if staleness is None:
        assert stalest > 4
    else:
        assert stalest <= staleness
        assert stalest == staleness or staleness > 1


def test_the_bound_is_held_by_the_server(pool: Pool) -> None:
    """Without its gate the law above is broken."""
    found = pool.run(without_gate, world=4)
    assert max(each["stalest"] for each in found) > 1


def without_gate() -> dict[str, Any]:
    original = async_parameter_server.ParameterServer._may_go_on
    async_parameter_server.ParameterServer._may_go_on = lambda self, worker: True  # type: ignore[method-assign]
    try:
        return stepped("even", servers(1, 2), "dp4", 25, SGD, 6)
    finally:
        async_parameter_server.ParameterServer._may_go_on = original  # type: ignore[method-assign]


def counted(params: torch.dtype, default: torch.dtype) -> dict[str, list[str]]:
    """The dtypes of what servers keep, if the thread that trains has another default just when a
    server takes its steps."""
    server = async_parameter_server.ParameterServer
    original = server._step

    def meanwhile(self: async_parameter_server.ParameterServer, *rest: Any) -> int:
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            return original(self, *rest)
        finally:
            torch.set_default_dtype(before)

    of = subject("even", servers(0))
    model = seeded(of.build)
    engine = weft.Engine(
        model.to(params), laid(of, model, "dp2"), optimizer=ADAM, loss=of.loss, device="cpu"
    )
    server._step = meanwhile  # type: ignore[method-assign]
    try:
        for batch in batches(of, 2):
            engine.step({k: v.to(params) for k, v in engine.local(batch).items()})
    finally:
        server._step = original  # type: ignore[method-assign]
    found: dict[str, list[str]] = {}
    served = engine.replicas.server
    for kept in served._optimizer.state.values() if served is not None else ():
        for key, value in kept.items():
            found.setdefault(key, []).append(str(value.dtype))
    engine.gather(last=True)
    return found


@pytest.mark.parametrize("params", [torch.float32, torch.float64])
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_what_a_server_keeps_has_its_own_dtype(
    pool: Pool, params: torch.dtype, default: torch.dtype
) -> None:
    found = pool.run(counted, params, default, world=2)[0]
    assert found["step"]
    assert {key: set(dtypes) for key, dtypes in found.items()} == {
        key: {str(params)} for key in ("step", "exp_avg", "exp_avg_sq")
    }


def broken_server() -> None:
    original = async_parameter_server.ParameterServer._step

    def fails(self: async_parameter_server.ParameterServer, worker: int, *rest: Any) -> int:
        if worker == 0:
            raise ValueError("the tea is cold")
        return original(self, worker, *rest)

    async_parameter_server.ParameterServer._step = fails  # type: ignore[method-assign]
    try:
        stepped("even", servers(None), "dp2", 5, SGD)
    finally:
        async_parameter_server.ParameterServer._step = original  # type: ignore[method-assign]


def test_what_goes_wrong_in_a_server_is_said(pool: Pool) -> None:
    with pytest.raises(
        WorkerDied, match=r"parameter server of replica 0 failed(.|\n)*the tea is cold"
    ):
        pool.run(broken_server, world=2)


@pytest.mark.grid(1, ci=1)
@pytest.mark.parametrize("codec", ["int8", "topk", "powersgd"])
def test_it_learns_in_every_codec(tmp_path: Path, pool: Pool, codec: str) -> None:
    table = {"name": "parameter_server", "staleness": 2, "servers": 2, "codec": codec}
    run = written(
        tmp_path, "dp2", {**{f"sync__{k}": v for k, v in table.items()}, "train__steps": 80}
    )
    pool.run(train, run, False, replica_ranks=[[0], [1]])
    seen = [line["loss"] for line in lines(run) if "loss" in line]
    assert seen[-1] < 0.6 * seen[0]
    last = [line for line in lines(run) if "loss" in line][-1]
    assert last["sent_bytes"] > 0
    assert max(line.get("staleness", 0) for line in lines(run)) <= 2


@pytest.mark.grid(1)
@pytest.mark.parametrize("axes", ["dp2", "dp2.tp2", "dp2.fsdp2"])
def test_a_checkpoint_is_whole_and_goes_on(tmp_path: Path, pool: Pool, axes: str) -> None:
    table = {"sync__name": "parameter_server", "sync__staleness": 1, "sync__servers": 2}
    apart = weft.Layout.parse(axes).replicas()
    run = written(tmp_path, axes, {**table, "train__steps": 3})
    pool.run(train, run, False, replica_ranks=apart)
    first = saved(run, 3)
    assert any(name.startswith("optimizer/") for name in first)
    run = written(tmp_path, axes, table)
    pool.run(train, run, True, replica_ranks=apart)
    second = saved(run, 6)
    assert first.keys() == second.keys()
    assert (
        float(second[next(n for n in second if n.endswith("/step"))]) > 6
    )  # of all workers' gradients
    alone = written(tmp_path, "dp1", {"train__steps": 8})
    pool.run(train, alone, True, world=1)  # any layout goes on
    assert lines(alone)[-1]["step"] == 8


ASYNC = {"name": "parameter_server", "staleness": 2, "timeout_s": 3.0}


@pytest.mark.grid(1)
@pytest.mark.parametrize(("how", "replica"), [("dies", 1), ("stalls", 2)])
def test_a_worker_that_dies_stops_nobody(tmp_path: Path, how: str, replica: int) -> None:
    run = failing(tmp_path, "dp3", how, replica, ASYNC)
    replica_workers.run_replicas(train, [[0], [1], [2]], run, False, threads=1, needed={0})
    counts = [int(line["replicas"]) for line in lines(run) if "replicas" in line]
    assert lines(run)[-1]["step"] == 60
    assert re.match("3+2+3+", "".join(map(str, counts))), (
        counts
    )  # at the end some are done before others


def test_a_server_that_dies_stops_the_run_and_a_checkpoint_goes_on(tmp_path: Path) -> None:
    run = failing(tmp_path, "dp2", "dies", 0, ASYNC, steps=20)
    with pytest.raises(WorkerDied, match="killed by SIGKILL"):
        replica_workers.run_replicas(train, [[0], [1]], run, False, threads=1, needed={0})
    replica_workers.run_replicas(train, [[0], [1]], run, True, threads=1, needed={0})
    assert lines(run)[-1]["step"] == 20


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"staleness": -1}, "is not allowed"),
        ({"staleness": "some"}, "is not allowed"),
        ({"staleness": 2, "bucket_mb": 4.0}, "one message"),
        ({"staleness": 2, "servers": 3}, "has 2 replicas"),
        ({"staleness": 2, "codec": "dgc"}, "keeps momentum of gradients"),
        ({"timeout_s": 3.0}, "waits for all replicas"),
    ],
)
def test_what_is_refused(tmp_path: Path, table: dict, says: str) -> None:
    run = written(tmp_path, "dp2", {}).model_copy(
        update={"sync": SyncConfig(name="parameter_server", **table)}
    )
    with pytest.raises(Refusal, match=says):
        run_checks.check_run(run)


def test_the_synchronous_server_is_another() -> None:
    assert isinstance(sync.make_sync("parameter_server"), SyncEveryStep)
    unbounded = sync.make_sync("parameter_server", staleness="none")
    assert isinstance(unbounded, AsyncServers)
    assert unbounded.staleness is None
