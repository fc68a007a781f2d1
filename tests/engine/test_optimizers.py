"""Every optimizer equals one device on every layout; groups, marks and refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

import weft
from tests.cases import LENGTH, VOCAB, Subject
from weft.engine.optimizer_factory import make_optimizer
from weft.engine.optimizers import elementwise
from weft.nn.models import decoder
from weft.verification.case import Case
from weft.verification.compare import LayoutResult, check_layout
from weft.verification.reference import Reference, run_reference

GROUPS: dict[str, Any] = {
    "decay_min_dims": 2,
    "groups": {"embedding.*": {"lr": 3e-3, "weight_decay": 0.2}, "*.wq.*": {"lr": 5e-3}},
}


@elementwise
class SignMomentum(torch.optim.SGD):
    """A user's own."""


OPTIMIZERS: dict[str, Any] = {
    "adamw": make_optimizer("adamw", lr=1e-2, weight_decay=0.1, **GROUPS),
    "adamw-foreach": make_optimizer("adamw", lr=1e-2, foreach=True, **GROUPS),
    "sgd": make_optimizer("sgd", lr=1e-2, momentum=0.9, **GROUPS),
    "adagrad": make_optimizer("adagrad", lr=1e-2),
    "rmsprop": make_optimizer("rmsprop", lr=1e-3),
    "rprop": make_optimizer("rprop", lr=1e-3),
    "lion": make_optimizer("lion", lr=1e-3, weight_decay=0.1, **GROUPS),
    "adafactor": make_optimizer("adafactor", lr=1e-2, weight_decay=0.1, **GROUPS),
    "muon": make_optimizer(
        "muon", lr=1e-2, adamw_lr=1e-3, adamw=["embedding.*", "head.*"], decay_min_dims=2
    ),
    "own": partial(SignMomentum, lr=1e-2),
}
DECODER = Subject(partial(decoder, VOCAB, 32, 2, 4, 2, seq_len=LENGTH), clip=0.5)
EXPERTS = Subject(partial(decoder, 64, 32, 2, 4, 2, seq_len=LENGTH, experts=4))


def case_of(name: str, subject: Subject = DECODER) -> Case:
    return replace(subject.case(), optimizer=OPTIMIZERS[name])


@cache
def reference(name: str, subject: Subject = DECODER) -> Reference:
    return run_reference(case_of(name, subject), 2)


def verified(pool: Any, name: str, layout: str, subject: Subject = DECODER) -> LayoutResult:
    world = weft.Layout.parse(layout).world
    found = pool.run(
        check_layout, case_of(name, subject), layout, reference(name, subject), world=world
    )[0]
    assert isinstance(found, LayoutResult)
    return found


ELEMENTWISE = [
    *(("adamw", layout) for layout in ("dp2", "fsdp2.tp2", "fsdp2+zero1", "pp2", "pp2.fsdp2")),
    *(("adamw-foreach", layout) for layout in ("fsdp2", "tp2")),
    *(("sgd", layout) for layout in ("fsdp2", "tp2+sequence")),
    *(("adagrad", layout) for layout in ("fsdp2", "tp2")),
    *(("rmsprop", layout) for layout in ("fsdp2+zero2",)),
    *(("rprop", layout) for layout in ("dp2", "fsdp2", "tp2")),
    *(("lion", layout) for layout in ("dp2", "fsdp2", "fsdp2+zero1", "tp2", "pp2.dp2", "dp2.tp2")),
    ("own", "fsdp2"),
]


@pytest.mark.grid
@pytest.mark.parametrize(("name", "layout"), ELEMENTWISE)
def test_an_elementwise_optimizer_equals_one_device(pool: Any, name: str, layout: str) -> None:
    result = verified(pool, name, layout)
    assert result.passed, result


WHOLE = [
    *(("adafactor", layout) for layout in ("dp2", "fsdp2", "tp2", "fsdp2.tp2", "fsdp2+zero1")),
    *(("muon", layout) for layout in ("dp2", "fsdp2", "fsdp2+zero2", "tp2", "dp2.fsdp2", "tp4")),
    *(("muon", layout) for layout in ("pp2.fsdp2", "pp2.tp2", "fsdp2+offload", "vp2")),
    *(("muon", layout) for layout in ("fsdp2.tp2+sequence", "fsdp4", "dp2.tp2")),
]


@pytest.mark.grid
@pytest.mark.parametrize(("name", "layout"), WHOLE)
def test_an_optimizer_of_whole_tensors_equals_one_device(pool: Any, name: str, layout: str) -> None:
    result = verified(pool, name, layout)
    assert result.passed, result
