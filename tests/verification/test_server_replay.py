"""Asynchronous parameter servers equal their own sequential definition: one device that applies the
gradients in the order in which the servers did. A change of what servers do is seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import weft
from tests.engine.test_outer_optimizer import EVEN
from tests.engine.test_sync import with_sync
from tests.mutants import Mutant, mutated
from tests.verification.test_codec_definitions import BeforeANorm
from weft import sync
from weft.core.errors import ConfigError
from weft.launch.local_workers import Pool
from weft.optimizers import make_optimizer
from weft.verification.case import Case
from weft.verification.layout_result import LayoutResult
from weft.verification.plain.servers import order_faults, order_in_turns
from weft.verification.server_replay import check_replayed, replayed_reference
from weft.verification.verify_model import verify_case

TOPK = {"name": "topk", "density": 0.2}


def case_of(name: str = "decoder", staleness: Any = 2, **options: Any) -> Case:
    return with_sync(
        name, sync.make_sync("parameter_server", staleness=staleness, **options)
    ).case()


def replayed(case: Case, layout: str, *mutants: Mutant) -> LayoutResult:
    """In each rank: the run, and what one device does in its order."""
    with mutated(*mutants):
        return check_replayed(case, layout, replayed_reference(case, layout, 3))


RUNS: list[tuple[str, str, dict[str, Any]]] = [
    ("dp2", "decoder", {}),
    ("dp4", "decoder", {"servers": 2}),
    ("dp3", "decoder", {"servers": 3, "staleness": "none"}),
    ("dp2", "dropout", {"servers": 2, "staleness": 1}),
    ("dp2", "convnet", {}),
    ("dp2", "decoder", {"codec": "int8", "servers": 2}),
    ("dp2", "decoder", {"codec": TOPK}),
    ("dp2", "decoder", {"codec": {"name": "powersgd", "rank": 2}}),
    ("dp2", "decoder", {"codec": {"name": "int4", "stochastic": True}}),
]


@pytest.mark.grid(3)
@pytest.mark.parametrize(("layout", "name", "options"), RUNS, ids=str)
def test_equals_its_definition(pool: Pool, layout: str, name: str, options: dict) -> None:
    if layout == "dp3":
        layout = "dp4"  # whose batch divides
    case = replace(case_of(name, **options), clip=0.5)
    result = pool.run(replayed, case, layout, world=weft.Layout.parse(layout).world)[0]
    assert result.passed, result
    assert result.steps == 8
    assert max(result.loss_rel_err, result.grad_rel_err, result.param_rel_err) < 1e-9, result


# those that keep numbers which their rounding shows in, or state from the start
OPTIMIZERS: list[tuple[str, Any]] = [("nadam", 2), ("asgd", 2), ("adagrad", 2), ("adagrad", 0)]


@pytest.mark.grid(2)
@pytest.mark.parametrize(("optimizer", "staleness"), OPTIMIZERS)
def test_what_an_optimizer_keeps_is_no_alarm(optimizer: str, staleness: int) -> None:
    case = replace(case_of(staleness=staleness), optimizer=make_optimizer(optimizer, lr=1e-2))
    report = verify_case(case, ["dp2"])
    assert report.passed, report.text()


CENTRED = {"lr": 1e-2, "centered": True, "momentum": 0.9}


def test_rounding_that_grows_is_no_alarm(pool: Pool) -> None:
    """A centred RMSprop divides by the root of a difference of nearly equal numbers."""
    case = replace(case_of(), optimizer=make_optimizer("rmsprop", **CENTRED))
    result = pool.run(replayed, case, "dp2", world=2)[0]
    assert result.passed, result
    # how far it grows depends on the order in which the servers' updates came
    assert result.widened.keys() == result.beyond.keys(), result


def test_a_fault_is_seen_beside_rounding_that_grows(pool: Pool) -> None:
    case = replace(case_of(), optimizer=make_optimizer("rmsprop", **CENTRED))
    fault = Mutant(SERVERS, STEP, "p.grad = view if", "p.grad = view * (1 + 1e-7) if")
    result = pool.run(replayed, case, "dp2", fault, world=2)[0]
    assert not result.passed, result


SERVERS = "weft.engine.replica_sync.async_parameter_server"
STEP, RELEASE = "ParameterServer._step", "ParameterServer._release"
MUTANTS: dict[str, tuple] = {
    "rate not divided": ({}, SERVERS, STEP, " / self._quorum.replicas", ""),
    "gradient of the wrong sign": ({}, SERVERS, STEP, "p.grad = view if", "p.grad = -view if"),
    "update left out": (
        {},
        SERVERS,
        STEP,
        "self._optimizer.step()",
        "self._optimizer.step() if sum(self._clocks.values()) != 3 else None",
    ),
    "update applied twice": (
        {},
        SERVERS,
        STEP,
        "self._optimizer.step()",
        "[self._optimizer.step() for _ in range(2)]",
    ),
    "applied to a stale version": (
        {},
        SERVERS,
        STEP,
        "self._optimizer.step()",
        "(lambda old: [self._optimizer.step(), setattr(self, 'old', self._flat.clone()),"
        " old is not None and self._flat.data.copy_(old)])(getattr(self, 'old', None))",
    ),
    "weights of before": (
        {},
        SERVERS,
        RELEASE,
        "self._flat.clone() if flat is None else flat",
        "self.__dict__.setdefault('first', self._flat.clone())",
    ),
    "a parameter is not pulled": (
        {},
        SERVERS,
        "AsyncWorker._receive",
        "zip(link.part.params, link.part.views(link.got), strict=True)",
        "zip(link.part.params[1:], link.part.views(link.got)[1:], strict=True)",
    ),
    "what a worker sends is doubled": (
        {},
        SERVERS,
        "AsyncWorker._exchange",
        "flat = torch.cat(parts)",
        "flat = 2 * torch.cat(parts)",
    ),
    "clipped to another norm": (
        {},
        "weft.engine.grad_update",
        "GradUpdate.__call__",
        "torch.clamp(self.clip / (norm + 1e-6), max=1.0)",
        "torch.clamp(2 * self.clip / (norm + 1e-6), max=1.0)",
    ),
    "same draws by every worker": (
        {"codec": {"name": "int4", "stochastic": True}},
        "weft.core.sync",
        "AsyncServers.worker_view",
        "{part} of worker {worker}",
        "{part}",
    ),
    "residual of a worker lost": (
        {"codec": "int4"},
        "weft.core.codec",
        "MessageCodec.reduce",
        'torch.sub(x, own, out=state["residual"])',
        "pass",
    ),
}


@pytest.mark.grid(4)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_change_is_seen(pool: Pool, name: str) -> None:
    options, *mutant = MUTANTS[name]
    case = replace(case_of(**options), clip=0.5)
    result = pool.run(replayed, case, "dp2", Mutant(*mutant), world=2)[0]
    assert not result.passed, result


SLOW = Mutant(
    SERVERS,
    "AsyncWorker._exchange",
    "reached = [float",
    "reached = time.sleep(0.3 * self._quorum.replica) or [float",
)
NO_BOUND = Mutant(SERVERS, "ParameterServer._may_go_on", "is None or worker", "or True or worker")


def test_a_worker_that_goes_on_too_early_is_seen(pool: Pool) -> None:
    """The other one is slow: with the bound it is waited for."""
    case = case_of(staleness=1)
    result = pool.run(replayed, case, "dp2", SLOW, world=2)[0]
    assert result.passed, result
    result = pool.run(replayed, case, "dp2", SLOW, NO_BOUND, world=2)[0]
    assert "server 0: worker 0 goes on 2 steps ahead, where 1 are most" in str(result.problem)
    assert not result.passed


def test_what_an_order_may_not_be() -> None:
    """Two workers, two steps, a bound of one step; the first saves in the end."""
    gets, pushes, saves = ([(what, n) for n in (0, 1)] for what in ("gave", "applied", "showed"))

    def step(worker: int) -> list[tuple[str, int]]:
        return [pushes[worker], gets[worker]]

    fair = [*gets, *step(0), *step(1), *step(0)]
    whole = [*fair, *step(1), saves[0]]
    assert order_faults(whole, 2, 2, 1, shown=1) == []
    lacks = ["1 of the 2 gradients of worker 1 were applied", "the first worker saves"]
    for found, want in zip(order_faults(fair, 2, 2, 1, shown=1), lacks, strict=True):
        assert found.startswith(want)
    alone = [*gets, *step(0), *step(0)]
    last = [*step(1), *step(1), saves[0]]
    ahead = "worker 0 goes on 2 steps ahead, where 1 are most"
    assert order_faults([*alone, *last], 2, 2, 1, shown=1) == [ahead]
    assert order_faults([*alone, *last], 2, 2, None, shown=1) == []
    twice = [*gets, pushes[0], pushes[0], gets[0], *last]
    assert "not in turn" in order_faults(twice, 2, 2, None, shown=1)[0]
    early = [*gets, pushes[0], saves[0], gets[0], *step(0), *step(1), *step(1)]
    assert "has not got weights" in order_faults(early, 2, 2, None, shown=1)[0]
    assert order_faults(order_in_turns(3, 4, lambda step: step % 2 == 0), 3, 4, 1, shown=2) == []


def test_signs_of_rounding_are_refused() -> None:
    """Of a bias before a norm: no definition tells them."""
    served = sync.make_sync("parameter_server", "sign", staleness=2)
    plan = (("accumulate", 2), ("sync", served))
    case = replace(EVEN, build=BeforeANorm, plan=plan).case()
    with pytest.raises(ConfigError, match=r"worker \d encodes \d+ numbers that are only rounding"):
        verify_case(case, ["dp2"])


def test_what_the_report_says() -> None:
    report = verify_case(case_of(), ["dp2", "dp1"])
    assert report.passed, report.text()
    assert "parameter_server, asynchronous, servers 1, staleness 2" in report.text()
    assert report.results[1].definition == ""


def test_an_order_for_each_rank_of_a_replica_is_refused() -> None:
    with pytest.raises(ConfigError, match="each rank of a replica has its own server"):
        replayed_reference(case_of(), "dp2.tp2", 3)
