"""Every optimizer that weft knows takes the same steps under a layout as on one device: no false
alarm, also where rounding is all that a weight gets; and a fault of one element of its state, or
state that one side alone has, is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.cases import SUBJECTS, Subject, in_turn
from tests.verification.test_rounding import STEPS, FreeBias, FusedKeys, KeyBiases
from weft.optimizers import known_optimizers, make_optimizer
from weft.verification.case import Case
from weft.verification.compare import check_layout
from weft.verification.difference import Bounds
from weft.verification.layout_result import LayoutResult
from weft.verification.reference import run_reference
from weft.verification.rounding import may_be_rounding, measure_rounding, within_rounding
from weft.verification.tensor_errors import saved_state_errors

LR = {"sgd": 0.1, "adadelta": 1.0, "rprop": 1e-3, "lion": 1e-3}
EMBEDDINGS = ["embedding.*", "head.*"]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{name: {"kind": name, "lr": LR.get(name, 1e-2)} for name in known_optimizers()},
    "muon": {"kind": "muon", "lr": 1e-2, "adamw": EMBEDDINGS},
    "nesterov": {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True},
    "amsgrad": {"kind": "adamw", "lr": 1e-2, "amsgrad": True},
    "centered": {"kind": "rmsprop", "lr": 1e-2, "centered": True, "momentum": 0.9},
    "decay by dims": {"kind": "adamw", "lr": 1e-2, "weight_decay": 0.3, "decay_min_dims": 2},
}
MODELS = {
    "decoder": SUBJECTS["decoder"],
    "keys": Subject(KeyBiases),
    "fused keys": Subject(FusedKeys),
    "free bias": Subject(FreeBias),
}
ON = [(model, layout) for layout in ("dp2", "fsdp2", "pp2") for model in MODELS]


def case_of(model: str, optimizer: str) -> Case:
    return replace(MODELS[model].case(), optimizer=make_optimizer(**OPTIMIZERS[optimizer]))


def judged(case: Case, layout: str, fault: Callable[[dict[str, Any]], None] | None) -> LayoutResult:
    """`fault`: changes the layout's state of a weight after each step."""
    alone = run_reference(case, STEPS)
    ours = case if fault is None else replace(case, optimizer=Faulty(case.optimizer, fault))
    result = check_layout(ours, layout, alone)
    if not may_be_rounding(result, case, alone):
        return result
    return within_rounding(result, measure_rounding(case, layout, alone))


@dataclass
class Faulty:
    """An optimizer with wrong state of `WEIGHT`."""

    make: Any
    fault: Callable[[dict[str, Any]], None]

    def __call__(self, named: Any) -> torch.optim.Optimizer:
        named = list(named)
        made: torch.optim.Optimizer = self.make(named)
        weight = dict(named).get(WEIGHT)
        if weight is not None:
            made.register_step_post_hook(lambda *_: self.fault(made.state[weight]))
        return made


WEIGHT = "blocks.0.qkv.bias"  # [48]: of queries, keys, whose gradient is rounding alone, and values


def off_by_a_little(state: dict[str, Any]) -> None:
    """The element of one query."""
    for key, value in state.items():
        if value.shape == (48,):
            value[3].mul_(1.0 + 1e-6)
            state[key] = value


def of_one_side(state: dict[str, Any]) -> None:
    state["extra"] = torch.ones(48, dtype=torch.float64)


@pytest.mark.grid(6)
@pytest.mark.parametrize(("optimizer", "on"), in_turn(OPTIMIZERS, ON, 1), ids=str)
def test_a_correct_layout_is_equal(pool: Any, optimizer: str, on: tuple[str, str]) -> None:
    model, layout = on
    result = pool.run(judged, case_of(model, optimizer), layout, None, world=2)[0]
    assert result.passed, result


@pytest.mark.parametrize("optimizer", ["rprop", "centered"])
def test_state_of_rounding_alone_is_no_alarm(pool: Any, optimizer: str) -> None:
    """The size of a step by a sign, and a momentum of quotients."""
    result = pool.run(judged, case_of("fused keys", optimizer), "dp2", None, world=2)[0]
    assert result.passed, result


@pytest.mark.parametrize("optimizer", ["rprop", "centered", "nadam", "asgd"])
def test_state_beside_it_is_seen(pool: Any, optimizer: str) -> None:
    case = case_of("fused keys", optimizer)
    result = pool.run(judged, case, "dp2", off_by_a_little, world=2)[0]
    assert not result.passed, result


def test_state_that_one_device_has_not_is_seen(pool: Any) -> None:
    result = pool.run(judged, case_of("fused keys", "adam"), "dp2", of_one_side, world=2)[0]
    seen = "optimizer/blocks.0.qkv.bias/extra (not on one device)"
    assert not result.passed and result.first is not None and result.first.startswith(seen), result


@pytest.mark.parametrize("lacks", ["saved", "final"])
def test_state_that_a_checkpoint_lacks_is_seen(lacks: str) -> None:
    names = ("a", "optimizer/a/exp_avg", "optimizer/a/exp_avg_sq")
    sides = {side: {name: torch.ones(4) for name in names} for side in ("saved", "final")}
    del sides[lacks]["optimizer/a/exp_avg_sq"]
    found = saved_state_errors(sides["saved"], sides["final"], ["a"], {}, Bounds())
    wrong = {name for name, error in found.items() if error}
    assert wrong == {"optimizer/a/exp_avg_sq (on one side only)"}
