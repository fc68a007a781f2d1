"""Replicas that step by themselves equal their own sequential definition: local SGD, BMUF, DiLoCo,
whatever a replica is inside. A change of weft's outer step, or of when it is taken, is seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import weft
from tests.engine.test_sync import with_sync
from tests.mutants import Mutant, mutated
from weft import sync
from weft.core.errors import ConfigError
from weft.core.sync import LocalSteps
from weft.launch.local_workers import Pool
from weft.verification.case import Case
from weft.verification.compare import check_layout
from weft.verification.layout_result import LayoutResult
from weft.verification.plain.replicas import RULES
from weft.verification.replica_reference import MOST_STEPS, run_replicas, shortened
from weft.verification.verify_model import verify_case

KINDS: dict[str, dict[str, Any]] = {
    "local_sgd": {"name": "local_sgd", "period": 3},
    "bmuf": {"name": "bmuf", "period": 2, "momentum": 0.6, "rate": 0.8},
    "bmuf nesterov": {
        "name": "bmuf",
        "period": 2,
        "momentum": 0.6,
        "rate": 0.8,
        "nesterov": True,
    },
    "diloco": {"name": "diloco", "period": 3},
    "no momentum": {"name": "diloco", "period": 2, "momentum": 0.0},
    "streaming": {"name": "diloco", "period": 4, "fragments": 3, "delay": 2},
    "local fragments": {"name": "local_sgd", "period": 3, "fragments": 3, "delay": 1},
    "int8": {"name": "diloco", "period": 2, "codec": "int8"},
    "topk": {"name": "local_sgd", "period": 2, "codec": {"name": "topk", "density": 0.2}},
    "powersgd": {"name": "bmuf", "period": 2, "codec": {"name": "powersgd", "rank": 2}},
    "every step": {"name": "local_sgd", "period": 1},
}


def case_of(kind: str, name: str = "decoder") -> Case:
    return with_sync(name, sync.make_sync(**KINDS[kind])).case()


RUNS = [
    *((kind, "dp2") for kind in KINDS),
    ("streaming", "dp4"),
    ("int8", "dp4"),
    ("bmuf nesterov", "dp2.tp2"),
    ("streaming", "tp2.dp2"),
    ("powersgd", "dp2.tp2+sequence"),
    ("streaming", "dp2.fsdp2"),
    ("int8", "dp2.fsdp2"),
    ("diloco", "dp2.pp2"),
    ("streaming", "pp2+zb-h1.dp2"),
    ("local_sgd", "dp2.cp2+ulysses"),
]


@pytest.mark.grid(4)
@pytest.mark.parametrize(("kind", "layout"), RUNS, ids=str)
def test_equals_its_definition(pool: Pool, kind: str, layout: str) -> None:
    case = case_of(kind, "deep" if "pp" in layout else "decoder")
    definition = run_replicas(case, layout, 2)
    world = weft.Layout.parse(layout).world
    result = pool.run(check_layout, case, layout, definition, world=world)[0]
    assert result.passed, result
    assert result.steps >= 2 * KINDS[kind]["period"]
    assert max(result.loss_rel_err, result.grad_rel_err, result.param_rel_err) < 1e-9, result


@pytest.mark.parametrize("name", ["dropout", "convnet"])
def test_masks_and_batch_norms_are_each_replicas_own(pool: Pool, name: str) -> None:
    case = replace(case_of("diloco", name), clip=0.5)
    result = pool.run(check_layout, case, "dp2", run_replicas(case, "dp2", 2), world=2)[0]
    assert result.passed, result


OUTER = "weft.engine.replica_sync.outer_optimizer"
STEP, AFTER, SEND = "OuterOptimizer._step", "OuterOptimizer.after", "OuterOptimizer._send"
MUTANTS: dict[str, tuple] = {
    "outer sign flipped": ("local_sgd", OUTER, STEP, "alpha=sync.lr", "alpha=-sync.lr"),
    "outer rate lost": ("diloco", OUTER, STEP, "alpha=sync.lr", "alpha=1.0"),
    "no Nesterov": ("diloco", OUTER, STEP, "if sync.nesterov", "if False"),
    "Nesterov in classical momentum": ("bmuf", OUTER, STEP, "if sync.nesterov", "if True"),
    "momentum forgotten": ("bmuf", OUTER, STEP, "mul_(sync.momentum)", "mul_(0.0)"),
    "momentum damped": (
        "diloco",
        OUTER,
        STEP,
        "add_(step)",
        "add_(step, alpha=1 - sync.momentum)",
    ),
    "sum in place of a mean": (
        "local_sgd",
        OUTER,
        SEND,
        "message.mean.div_(meeting.size)",
        "message.mean.div_(1)",
    ),
    "exchanged one step late": (
        "local_sgd",
        OUTER,
        AFTER,
        "(step - fragment.offset)",
        "(step - 1 - fragment.offset)",
    ),
    "period too short": (
        "diloco",
        OUTER,
        AFTER,
        "% self._sync.period",
        "% (self._sync.period - 1)",
    ),
    "a fragment left out": (
        "streaming",
        OUTER,
        AFTER,
        "for fragment in self.fragments:",
        "for fragment in self.fragments[1:]:",
    ),
    "merged one step early": (
        "streaming",
        OUTER,
        AFTER,
        "since == self._sync.delay",
        "since == self._sync.delay - 1",
    ),
    "all replicas have the same samples": (
        "local_sgd",
        "weft.core.data_order",
        "data_rank_indices",
        "micro * data_size + data_rank",
        "micro * data_size",
    ),
    "all replicas draw the same masks": (
        "dropout",
        "weft.nn.dropout_rng",
        "mix_key",
        "state = 0",
        "if len(words) == 2:\n        return words[0]\n    state = 0",
    ),
    "a weight that nobody exchanges": (
        "local_sgd",
        OUTER,
        "message_params",
        "if weight.name in names:",
        "if weight.name in names and weight is not trained[0]:",
    ),
    "what was done meanwhile is lost": (
        "streaming",
        OUTER,
        STEP,
        "anchor - message.sent",
        "anchor - message.flat()",
    ),
    "anchor of before": (
        "local_sgd",
        OUTER,
        STEP,
        "message.views(anchor), strict",
        "message.views(anchor + step * sync.lr), strict",
    ),
    "weights not exchanged": ("local_sgd", OUTER, STEP, "p.copy_(new)", "pass"),
    "residual of each exchange lost": (
        "int8",
        OUTER,
        SEND,
        "message.state[key].copy_(value)",
        "message.state[key].zero_()",
    ),
    "every replica has the first one's masks": (
        "dropout",
        "weft.engine.engine",
        "Engine.__init__",
        "seed = mix_key(seed, self.replicas.index)",
        "pass",
    ),
    "every replica has the first one's samples": (
        "local_sgd",
        "weft.engine.engine",
        "Engine.__init__",
        "self.global_plan.layout.index(self.mesh.place, *DATA_AXES)",
        "0",
    ),
    "loss of a replica divided by all samples": (
        "local_sgd",
        "weft.engine.grad_update",
        "GradUpdate.__call__",
        "self.plan.batch / (weight",
        "0.5 * self.plan.batch / (weight",
    ),
}


def both_sides(mutant: Mutant, case: Case, layout: str) -> LayoutResult:
    """The definition and the layout, both with the mutant."""
    with mutated(mutant):
        return check_layout(case, layout, run_replicas(case, layout, 2))


@pytest.mark.grid(6)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_change_is_seen(pool: Pool, name: str) -> None:
    kind, *mutant = MUTANTS[name]
    case = case_of("local_sgd", "dropout") if kind == "dropout" else case_of(kind)
    result = pool.run(both_sides, Mutant(*mutant), case, "dp2", world=2)[0]
    assert not result.passed, result


@pytest.mark.parametrize("name", ["outer rate lost", "no Nesterov"])
def test_the_exchange_that_is_wrong_is_named(pool: Pool, name: str) -> None:
    """After the last step of a period, before a loss tells of it."""
    kind, *mutant = MUTANTS[name]
    result = pool.run(both_sides, Mutant(*mutant), case_of(kind), "dp2", world=2)[0]
    period = KINDS[kind]["period"]
    assert f" after step {period - 1} " in str(result.first), result


def test_a_long_period_is_shortened_and_the_report_says_so() -> None:
    made = sync.make_sync("diloco", period=100, fragments=2, delay=30)
    assert isinstance(made, LocalSteps)
    case = with_sync("decoder", made).case()
    report = verify_case(case, ["dp2", "dp1"])
    assert report.passed, report.text()
    assert "equal to its own sequential definition on one device: diloco" in report.text()
    assert "period 4 in place of 100" in report.text()
    assert "delay 3 in place of 30" in report.text()
    assert "after 11 steps" in report.text()
    assert (
        report.text().count("not audited       messages of replicas that step independently") == 1
    )
    assert report.results[1].definition == ""
    as_it_is = sync.make_sync("local_sgd", period=MOST_STEPS // 2)
    assert isinstance(as_it_is, LocalSteps) and shortened(as_it_is) == as_it_is


def test_a_method_without_a_definition_is_refused() -> None:
    made = replace(sync.make_sync("local_sgd"), name="lookahead")  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=r"lookahead.*has no sequential definition"):
        run_replicas(with_sync("decoder", made).case(), "dp2", 2)
    independent = [n for n, make in registry_of().items() if make == LocalSteps]
    assert set(independent) == RULES.keys()


def registry_of() -> dict[str, type]:
    from weft.sync._registry import registry

    return {name: type(sync.make_sync(name)) for name in registry()}
