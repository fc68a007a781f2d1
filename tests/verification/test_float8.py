"""With float8 emulated, every layout equals one device within a few of its roundings, and sends
what was predicted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.cases import BATCH, LENGTH, VOCAB, Fused, Subject, batch_of, global_batch
from tests.verification.test_parity import transformer
from weft.nn.losses import next_token
from weft.nn.models import decoder
from weft.verification.case import Case
from weft.verification.compare import LayoutResult, check_layout
from weft.verification.reference import Reference, run_reference

RECIPES = ("rowwise", "rowwise_with_gw_hp", "tensorwise")
tiny = partial(decoder, VOCAB, 64, 2, 4, 2, seq_len=LENGTH)
SUBJECTS = {
    "decoder": Subject(tiny),
    "experts": Subject(partial(tiny, experts=4, bias=0.01)),
    "recomputed": Subject(tiny, plan=(("accumulate", 2), ("recompute", "full"))),
    "bf16 sums": Subject(tiny, plan=(("accumulate", 2), ("reduce", "bf16"))),
    "fused": Subject(partial(Fused, dim=64)),
    "llama": Subject(partial(transformer, "llama")),
    "gpt2": Subject(partial(transformer, "gpt2")),
}
LAYOUTS = {
    "decoder": [
        *("dp1", "dp2", "fsdp2", "fsdp2+zero1", "fsdp2+offload", "dp2.fsdp2"),
        *("tp2", "tp4+sequence", "fsdp2.tp2+sequence", "vp2", "cp2", "ulysses2"),
        *("pp2", "pp2+zb-v", "pp2.fsdp2", "pp2.tp2"),
    ],
    "experts": ["dp2", "ep2"],
    "recomputed": ["fsdp2", "tp2+sequence", "pp2"],
    "bf16 sums": ["dp2"],
    "fused": ["dp2", "tp2+sequence"],
    "llama": ["fsdp2", "tp2+sequence"],
    "gpt2": ["dp2", "tp2"],
}
GRID = [
    (name, layout, recipe)
    for name, layouts in LAYOUTS.items()
    for layout in layouts
    for recipe in RECIPES
]


def single(build: Any) -> nn.Module:
    torch.manual_seed(0)
    return build()


def laid(subject: Subject, recipe: str, model: nn.Module, layout: str) -> weft.Plan:
    arguments = dict(subject.plan)
    if layout == "dp1":
        arguments.pop("recompute", None)
    sample = {key: value[:2] for key, value in global_batch(subject, 0).items()}
    given: dict[str, Any] = {"loss": subject.loss, "sample": sample, **arguments}
    plan = weft.plan(model, layout, batch=BATCH, precision="bf16", float8=recipe, **given)
    return plan.with_emulated_float8()


def case(subject: Subject, recipe: str) -> Case:
    return Case(
        build=partial(single, subject.build),
        plan=partial(laid, subject, recipe),
        batch=partial(batch_of, subject),
        loss=subject.loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        precision="float8",
    )


@cache
def reference(name: str, recipe: str) -> Reference:
    return run_reference(case(SUBJECTS[name], recipe), 1)


def run(pool: Any, name: str, layout: str, recipe: str) -> LayoutResult:
    world = weft.Layout.parse(layout).world
    subject = case(SUBJECTS[name], recipe)
    found = pool.run(check_layout, subject, layout, reference(name, recipe), world=world)[0]
    assert isinstance(found, LayoutResult)
    return found


@pytest.mark.grid
@pytest.mark.parametrize(("name", "layout", "recipe"), GRID)
def test_a_layout_in_float8_equals_one_device(
    pool: Any, name: str, layout: str, recipe: str
) -> None:
    result = run(pool, name, layout, recipe)
    import sys
    print(f"MEAS {name} {layout} {recipe} {result.loss_rel_err:.5f} {result.grad_rel_err:.4f} {result.param_rel_err:.5f} {result.worst} {result.first} {result.problem} {result.stray}", file=open("/tmp/meas.txt","a"))
    assert result.passed, result
    assert layout == "dp1" or result.comms_seen
