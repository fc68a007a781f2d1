"""Messages that come late (`tests.late_messages`) change nothing, and each wait of weft's that is
left out does."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import weft
from tests.bugs import held_to
from tests.cases import SUBJECTS, Subject, laid, seeded
from tests.engine import test_async_parameter_server as servers
from tests.engine.test_outer_optimizer import (
    ADAMW,
    PERIODIC,
    SGD,
    batches,
    subject as with_plan,
    trained as trained_alone,
)
from tests.engine.test_sync import EXACT, trained as trained_together, with_sync
from tests.late_messages import _LateSend, late_messages
from tests.mutants import Mutant, mutated
from tests.staged import STAGED
from tests.verification.nets_with_definitions import CASES
from weft import checkpoint, sync
from weft.checkpoint.writer import Retention
from weft.core.errors import WeftError
from weft.core.shards import LocalShard
from weft.core.sync import SyncEveryStep
from weft.engine.replica_sync.bucket_exchange import ThreadedExchange
from weft.engine.replica_sync.transports import RingTransport
from weft.launch.local_workers import Pool
from weft.train.stop_request import StopRequest
from weft.verification.compare import check_layout
from weft.verification.reference import Reference

TIMEOUT_S, SHORT_S = 180.0, 20.0

VERIFIED: dict[str, Subject] = {
    **SUBJECTS,
    **{f"deep-{name}": STAGED[name] for name in ("decoder", "tied", "deep", "t5", "convnet")},
    "experts": CASES["experts"],
    **{name: with_sync("decoder", made) for name, made in EXACT.items()},
}
PAIRS = [
    ("decoder", "dp2"),
    ("decoder", "fsdp2"),
    ("recomputed", "fsdp2"),
    ("decoder", "tp2"),
    ("decoder", "tp2+sequence"),
    ("decoder", "cp2"),
    ("ring", "dp2.tp2+sequence"),
    ("decoder", "cp2+ulysses"),
    ("decoder", "pp2"),
    ("deep-decoder", "pp2+gpipe"),
    ("deep-decoder", "pp2+interleaved"),
    ("deep-decoder", "pp2+zb-h1"),
    ("deep-decoder", "pp2+zb-v"),
    ("deep-decoder", "pp2+dualpipev"),
    ("deep-decoder", "pp2+pipedream"),
    ("deep-t5", "pp2"),
    ("deep-tied", "pp2"),
    ("deep-deep", "pp4"),
    ("clipped", "pp2.dp2"),
    ("deep-decoder", "pp2.fsdp2"),
    ("experts", "ep2"),
    ("decoder", "dp2.tp2"),
    ("decoder", "dp2.fsdp2"),
    ("convnet", "dp2"),
    ("ring", "dp2"),
    ("rings", "dp4"),
    ("central", "dp2"),
    ("servers", "dp4"),
]


def verified(name: str, layout: str, alone: Reference, *left_out: Mutant) -> str:
    """What verify says with late messages; "" if all is equal."""
    with late_messages(), mutated(*left_out):
        result = check_layout(VERIFIED[name].case(), layout, alone)
    return "" if result.passed else str(result.first or result.problem or result.stray or "numbers")


@pytest.mark.grid(12, ci=6)
@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_late_messages_change_nothing(pool: Pool, name: str, layout: str) -> None:
    alone, world = held_to(VERIFIED[name], layout), weft.Layout.parse(layout).world
    said = pool.run(verified, name, layout, alone, world=world, timeout=TIMEOUT_S)
    assert said == [""] * world


# ---- what verify does not run: its numbers are those without late messages -----------------------


def saved() -> dict[str, Tensor]:
    """Two checkpoints, one straight after the other, and what the first of them holds."""
    rank, world = dist.get_rank(), dist.get_world_size()
    folders: list[Any] = [TemporaryDirectory() if rank == 0 else None]
    names = [folders[0].name if rank == 0 else ""]
    dist.broadcast_object_list(names)
    place = (((slice(0, 2),), (slice(2 * rank, 2 * rank + 2),)),)
    weight, saver = torch.full((2,), 1.0), checkpoint.AsyncCheckpointer()
    for step in (1, 2):
        piece = LocalShard("w", weight, (2 * world,), place, True)
        saver.save(Path(names[0]), step, [piece], {}, {}, Retention(5))
        weight += 1.0
    saver.wait()
    found = torch.zeros(2)
    for step in (1, 2):
        into = LocalShard("w", found, (2 * world,), place, True)
        checkpoint.load_checkpoint(Path(names[0]), step, [into])
        assert found.tolist() == [float(step)] * 2
    dist.barrier()
    return {}


def stopped() -> dict[str, Tensor]:
    """After which call each rank hears that the second one was told to stop."""
    with StopRequest() as request:
        heard = []
        for step in range(3):
            request._asked = step == 0 and dist.get_rank() == 1
            heard.append(float(request.any_rank_stopped()))
    return {"heard": torch.tensor(heard)}


def together(codec: Any, route: str, layout: str) -> dict[str, Tensor]:
    losses, weights, *_ = trained_together(codec, route, layout, {}, 2)
    return {name: weight for name, (weight, _) in weights.items()} | {"loss": torch.tensor(losses)}


def summed() -> dict[str, Tensor]:
    """A number of every replica, as of a validation, and the weights of one that steps alone."""
    made, engine = _engine("even", PERIODIC["local_sgd"], "dp2", ADAMW)
    for step, batch in enumerate(batches(made, 4)):
        engine.step(engine.local(batch))
        total = torch.tensor([float(step + engine.replicas.index)])
        engine.replicas.sum_over(total, step + 1)
    return {"total": total, **{name: p.detach().clone() for name, p in engine.params.items()}}


def served() -> dict[str, Tensor]:
    """Weights and optimizer state, as the replica that leads gets them of all servers."""
    made, engine = _engine("even", servers.servers(0, 2), "dp2", ADAMW)
    for batch in batches(made, 3):  # the same for all: which one's comes first makes no difference
        engine.step({key: value[: len(value) // 2] for key, value in batch.items()})
    engine.gather(last=True)
    # a server's thread counts steps in the default dtype, which the first thread may have changed
    return {piece.name: piece.tensor.double() for piece in engine.tensors()}


def kept() -> dict[str, Tensor]:
    """What a checkpoint holds while weights are exchanged."""
    made, engine = _engine("even", PERIODIC["streaming"], "dp2", ADAMW)
    for batch in batches(made, 5):
        engine.step(engine.local(batch))
    return {piece.name: piece.tensor.clone() for piece in engine.tensors()}


def summed_twice() -> dict[str, Tensor]:
    """By the backend, then in a ring."""
    made, rank = sync.make_sync("ring"), dist.get_rank()
    assert isinstance(made, SyncEveryStep)
    x, exchange = torch.full((3,), rank + 1.0), ThreadedExchange()
    reduction = made.codec.reduce(x, {}, ((3,),), made.replica_view(2, rank))
    ring = dist.new_group()
    work = dist.all_reduce(x, async_op=True)
    exchange.launch(reduction, RingTransport(ring, [ring]), work)
    exchange.finish()
    return {"x": x}


def stale() -> dict[str, Tensor]:
    """How stale weights became on any rank, where one step is allowed."""
    stalest = servers.stepped("even", servers.servers(1, 2), "dp4", 10, SGD, 6)["stalest"]
    found = torch.tensor([float(stalest)])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return {"stalest": found}


def _engine(name: str, made: Any, layout: str, optimizer: Callable) -> tuple[Subject, weft.Engine]:
    of = with_plan(name, made)
    model = seeded(of.build)
    plan = laid(of, model, layout)
    return of, weft.Engine(model, plan, optimizer=optimizer, loss=of.loss, device="cpu")


OTHERS: dict[str, tuple[int, Callable[[], dict[str, Tensor]]]] = {
    "codec": (2, partial(together, "int8", "allreduce", "dp2")),
    "codec of two rounds": (2, partial(together, "powersgd", "allreduce", "dp2")),
    "codec inside a ring": (4, partial(together, "int8", "ring", "dp4")),
    "codec of fsdp": (2, partial(together, "int8", "allreduce", "fsdp2")),
    "codec of owners": (2, partial(together, "int8", "central", "dp2")),
    "two rounds to owners": (2, partial(together, "powersgd", "central", "dp2")),
    "local_sgd": (2, partial(trained_alone, "even", PERIODIC["local_sgd"], "dp2", 5, ADAMW)),
    "streaming": (2, partial(trained_alone, "even", PERIODIC["streaming"], "dp2", 5, ADAMW)),
    "coded": (
        2,
        partial(trained_alone, "even", sync.make_sync("diloco", "int8", period=2), "dp2", 5, ADAMW),
    ),
    "sum over replicas": (2, summed),
    "async servers": (2, served),
    "stale servers": (4, stale),
    "kept": (2, kept),
    "backend, then ring": (2, summed_twice),
    "checkpoint": (2, saved),
    "stop": (2, stopped),
}


def run_other(name: str, late: bool, *left_out: Mutant) -> dict[str, Tensor]:
    with late_messages() if late else nullcontext(), mutated(*left_out):
        return OTHERS[name][1]()


def other(pool: Pool, name: str, late: bool, *left_out: Mutant) -> list[dict[str, Tensor]]:
    arguments, timeout = (name, late, *left_out), SHORT_S if left_out else TIMEOUT_S
    return pool.run(run_other, *arguments, world=OTHERS[name][0], timeout=timeout)


@pytest.mark.grid
@pytest.mark.parametrize("name", OTHERS)
def test_the_rest_is_as_without_late_messages(pool: Pool, name: str) -> None:
    assert differing(other(pool, name, True), other(pool, name, False)) == []


def differing(found: list[dict[str, Tensor]], wanted: list[dict[str, Tensor]]) -> list[str]:
    assert [each.keys() for each in found] == [each.keys() for each in wanted]
    return [
        name
        for one, right in zip(found, wanted, strict=True)
        for name in right
        # servers step in the order in which gradients come
        if not torch.allclose(one[name], right[name], rtol=1e-9, atol=1e-12, equal_nan=True)
    ]


def slowly_sent() -> dict[str, Tensor]:
    """A message whose receiver waits long before the sender has got its work."""
    x, boxed = torch.full((3,), float(dist.get_rank())), _LateSend.boxed

    def slow(work: dist.Work) -> Any:
        time.sleep(1.0)
        return boxed(work)

    with late_messages(), mock.patch.object(_LateSend, "boxed", slow):
        if dist.get_rank() == 0:
            dist.recv(x, 1)
        else:
            work = dist.isend(x, 0)
            assert work is not None
            work.wait()
    return {"x": x}


def test_a_sender_may_be_slow(pool: Pool) -> None:
    found = pool.run(slowly_sent, world=2, timeout=TIMEOUT_S)
    assert [each["x"].tolist() for each in found] == [[1.0] * 3] * 2


# ---- each wait, left out -------------------------------------------------------------------------

ENGINE = "weft.engine."
BUCKETS, P2P = ENGINE + "grad_buckets", ENGINE + "pipeline.p2p"
RING = ENGINE + "context_parallel.ring_attention"
SYNC = ENGINE + "replica_sync."
TRANSPORTS, EXCHANGE = SYNC + "transports", SYNC + "bucket_exchange"
OUTER, SERVERS = SYNC + "outer_optimizer", SYNC + "async_parameter_server"
STATE = SYNC + "state_transfer"


def left_out(module: str, function: str, old: str, new: str = "pass") -> Mutant:
    return Mutant(module, function, old, new)


# what runs it (a pair of a model and a layout, or one of OTHERS), the wait
WAITS: dict[str, tuple[tuple[str, str] | str, Mutant]] = {
    "buckets": (("decoder", "dp2"), left_out(BUCKETS, "GradReducer.finish", "bucket.work.wait()")),
    "buckets of a synchroniser": (
        ("ring", "dp2"),
        left_out(BUCKETS, "GradReducer.finish", "self.exchange.finish()"),
    ),
    "weights of owners": (
        ("central", "dp2"),
        left_out(BUCKETS, "GradReducer.spread", "self.exchange.finish()"),
    ),
    "loss over stages": (
        ("decoder", "pp2"),
        left_out(
            ENGINE + "grad_update", "GradUpdate._sum_over_ranks", "self.training.agreed.wait()"
        ),
    ),
    "initial weights": (
        ("decoder", "dp2"),
        left_out(ENGINE + "initial_weights", "_broadcast", ".wait()", ""),
    ),
    "a message between stages": (
        ("decoder", "pp2"),
        left_out(
            P2P, "PipelineTransport.receive", "                work.wait()", "                pass"
        ),
    ),
    "a header": (
        ("decoder", "pp2"),
        left_out(P2P, "PipelineTransport._post", "work.wait()"),
    ),
    "what has been sent, at the end": (
        ("decoder", "pp2"),
        left_out(P2P, "PipelineTransport.end", ".work.wait()", ""),
    ),
    "keys on the ring": (
        ("decoder", "cp2"),
        left_out(RING, "_RingPasses.__iter__", "coming.wait()", "coming._arriving"),
    ),
    "sums on the ring": (
        ("decoder", "cp2"),
        left_out(RING, "_RingPasses.add", "self._sums.wait()", "self._sums._arriving"),
    ),
    "sums at home": (
        ("decoder", "cp2"),
        left_out(RING, "_RingPasses.home", "self._sums.wait()", "self._sums._arriving"),
    ),
    "sends of the ring": (
        ("decoder", "cp2"),
        left_out(RING, "_RingTransfer.wait", "in self._works", "in self._works[1::2]"),
    ),
    "tokens of experts": (
        ("experts", "ep2"),
        left_out("weft.parallel.expert_dispatch", "_AsyncAllToAll.wait", "work.wait()"),
    ),
    "a round of owners": (
        "coded",
        left_out(TRANSPORTS, "BackendTransport.answer", "work.wait()"),
    ),
    "all-to-all in a ring": (
        "codec inside a ring",
        left_out(TRANSPORTS, "RingTransport._scatter", "work.wait()"),
    ),
    "a chunk of a ring": (
        ("ring", "dp2"),
        left_out(TRANSPORTS, "_around", "        work.wait()", "        pass"),
    ),
    "sends of chunks": (("ring", "dp2"), left_out(TRANSPORTS, "_around", "send.wait()")),
    "a message to the owner": (
        "codec of owners",
        left_out(
            TRANSPORTS,
            "OwnerTransport.answer",
            "_send(ask.message, self._owner, self._group).wait()",
            "_send(ask.message, self._owner, self._group)",
        ),
    ),
    "messages at the owner": (
        "codec of owners",
        left_out(TRANSPORTS, "OwnerTransport.answer", " work.wait()", " pass"),
    ),
    "a gradient to the owner": (
        ("central", "dp2"),
        left_out(
            TRANSPORTS,
            "OwnerTransport._sum",
            "_send(x, self._owner, self._group).wait()",
            "_send(x, self._owner, self._group)",
        ),
    ),
    "gradients at the owner": (
        ("central", "dp2"),
        left_out(TRANSPORTS, "OwnerTransport._sum", " work.wait()", " pass"),
    ),
    "sends of the owner": (
        ("central", "dp2"),
        left_out(TRANSPORTS, "OwnerTransport.spread", " work.wait()", " pass"),
    ),
    "what the owner sends": (
        ("central", "dp2"),
        left_out(
            TRANSPORTS,
            "OwnerTransport.spread",
            "_receive(x, self._owner, self._group).wait()",
            "_receive(x, self._owner, self._group)",
        ),
    ),
    "a round of fsdp": (
        "codec of fsdp",
        left_out(EXCHANGE, "FSDPReduceScatter.__call__", "work.wait()"),
    ),
    "polled rounds, at the end": (
        "codec",
        left_out(EXCHANGE, "PolledExchange.finish", "self._flying[0].wait()"),
    ),
    "a polled round": ("codec", left_out(EXCHANGE, "_InflightReduction.wait", "self._work.wait()")),
    "a thread's reduction": (
        ("ring", "dp2"),
        left_out(EXCHANGE, "ThreadedExchange.finish", "future.result()"),
    ),
    "what the backend sums first": (
        "backend, then ring",
        left_out(EXCHANGE, "run_reduction", "after.wait()"),
    ),
    "a sum over replicas": (
        "sum over replicas",
        left_out(OUTER, "OuterOptimizer.add", ").wait()", ")"),
    ),
    "an exchange of weights": (
        "streaming",
        left_out(OUTER, "OuterOptimizer._merge", "self._arrive(fragment)"),
    ),
    "an exchange under way in a checkpoint": (
        "kept",
        left_out(OUTER, "OuterOptimizer.kept", "self.wait()"),
    ),
    "what a worker asks": (
        "async servers",
        left_out(SERVERS, "ParameterServer._served_by", ").wait()", ")"),
    ),
    "the head of a reply": (
        "async servers",
        left_out(
            SERVERS,
            "ParameterServer._reply",
            "start_async(dist.isend(head, group=group, group_dst=1)).wait()",
            "start_async(dist.isend(head, group=group, group_dst=1))",
        ),
    ),
    "weights in a reply": (
        "async servers",
        left_out(
            SERVERS,
            "ParameterServer._reply",
            "start_async(dist.isend(flat, group=group, group_dst=1)).wait()",
            "start_async(dist.isend(flat, group=group, group_dst=1))",
        ),
    ),
    "a step of the servers": (
        "async servers",
        left_out(SERVERS, "AsyncWorker.step", ".result()", ""),
    ),
    "a request to a server": (
        "async servers",
        left_out(SERVERS, "AsyncWorker._ask", ").wait()", ")"),
    ),
    "the head of an answer": (
        "stale servers",
        left_out(
            SERVERS,
            "AsyncWorker._receive",
            "dist.irecv(head, group=link.group, group_src=0)).wait()",
            "dist.irecv(head, group=link.group, group_src=0))",
        ),
    ),
    "weights in an answer": (
        "async servers",
        left_out(
            SERVERS,
            "AsyncWorker._receive",
            "dist.irecv(link.got, group=link.group, group_src=0)).wait()",
            "dist.irecv(link.got, group=link.group, group_src=0))",
        ),
    ),
    "state that is sent": ("async servers", left_out(STATE, "send_state", ").wait()", ")")),
    "the size of facts": (
        "async servers",
        left_out(
            STATE,
            "receive_facts",
            "start_async(dist.irecv(size, group=group, group_src=0)).wait()",
            "start_async(dist.irecv(size, group=group, group_src=0))",
        ),
    ),
    "facts": (
        "async servers",
        left_out(
            STATE,
            "receive_facts",
            "start_async(dist.irecv(text, group=group, group_src=0)).wait()",
            "start_async(dist.irecv(text, group=group, group_src=0))",
        ),
    ),
    "state that is received": (
        "async servers",
        left_out(STATE, "receive_tensors", ").wait()", ")"),
    ),
    "the checkpoint before": (
        "checkpoint",
        left_out("weft.checkpoint.async_save", "AsyncCheckpointer.save", "self.wait()"),
    ),
    "a checkpoint": (
        "checkpoint",
        left_out("weft.checkpoint.async_save", "AsyncCheckpointer.wait", "self._thread.join()"),
    ),
    "a request to stop": (
        "stop",
        left_out("weft.train.stop_request", "StopRequest._wait", "self._work.wait()"),
    ),
}


@cache
def right(name: str, pool: Pool) -> list[dict[str, Tensor]]:
    return other(pool, name, False)


@pytest.mark.grid(12, ci=6)  # some end by a timeout
@pytest.mark.parametrize("name", WAITS)
def test_a_wait_that_is_left_out_is_seen(pool: Pool, name: str) -> None:
    where, mutant = WAITS[name]
    try:
        if isinstance(where, str):
            said: list[str] = differing(other(pool, where, True, mutant), right(where, pool))
        else:
            subject, layout = where
            alone, world = held_to(VERIFIED[subject], layout), weft.Layout.parse(layout).world
            said = pool.run(verified, subject, layout, alone, mutant, world=world, timeout=SHORT_S)
    except WeftError as error:  # WorkerDied is one
        said = [str(error).strip().splitlines()[-1]]
    assert any(said)
