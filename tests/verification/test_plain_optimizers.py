"""weft's own optimizers are held to definitions of the one-device side: which parameters Muon
updates, the steps of Lion, and the codes of AdamW in 8 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases import SUBJECTS
from tests.mutants import Mutant, mutated
from weft.engine import OptimizerFactory, make_optimizer
from weft.verification.case import Case
from weft.verification.compare import check_layout
from weft.verification.layout_result import LayoutResult
from weft.verification.plain.parameter_groups import plain_optimizer
from weft.verification.reference import run_reference

FACTORIES: dict[str, OptimizerFactory] = {
    "muon": make_optimizer(
        "muon",
        lr=2e-2,
        adamw=["embedding.*", "head.*"],
        adamw_lr=1e-3,
        decay_min_dims=2,
        groups={"*.mlp.*": {"momentum": 0.8}},
    ),
    "lion": make_optimizer("lion", lr=1e-3, weight_decay=0.3, betas=(0.8, 0.95)),
    "adamw8bit": make_optimizer("adamw8bit", lr=1e-2, weight_decay=0.1),
}
MUON, LION, EIGHT = ("weft.engine.muon", "weft.engine.lion", "weft.engine.adamw8bit")
MUTANTS = {
    "an embedding is Muon's": (
        "muon",
        MUON,
        "MuonWithAdamW.__init__",
        "and not any(fnmatchcase(name, glob) for glob in adamw)",
        "",
    ),
    "a hidden matrix is AdamW's": ("muon", MUON, "MuonWithAdamW.__init__", "ndim == 2", "ndim > 2"),
    "all rates are Muon's": (
        "muon",
        MUON,
        "MuonWithAdamW.__init__",
        "lr if adamw_lr is None else adamw_lr",
        "lr",
    ),
    "no momentum of a group's own": (
        "muon",
        MUON,
        "MuonWithAdamW.__init__",
        "if key in keys",
        'if key in keys and key != "momentum"',
    ),
    "Lion decays without a rate": ("lion", LION, "_update", "1 - lr * decay", "1 - decay"),
    "Lion's betas the other way": ("lion", LION, "_update", "(now, later)", "(later, now)"),
    "codes rounded down": (
        "adamw8bit",
        EIGHT,
        "_store",
        "(table[1:] + table[:-1]) / 2",
        "table[1:]",
    ),
    "no correction of the second moment": (
        "adamw8bit",
        EIGHT,
        "_update",
        ".div_((1 - second**step) ** 0.5)",
        "",
    ),
}


def case(name: str) -> Case:
    return replace(SUBJECTS["decoder"].case(), optimizer=FACTORIES[name])


def both_sides(name: str, layout: str, *mutants: Mutant) -> LayoutResult:
    with mutated(*mutants):
        return check_layout(case(name), layout, run_reference(case(name), 3))


@pytest.mark.parametrize("what", MUTANTS)
def test_a_change_of_an_optimizer_is_seen(pool: Any, what: str) -> None:
    name, *change = MUTANTS[what]
    result = pool.run(both_sides, name, "dp1", Mutant(*change), world=1)[0]
    assert not result.passed, result


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2"])
@pytest.mark.parametrize("name", FACTORIES)
def test_both_sides_take_the_same_steps(pool: Any, name: str, layout: str) -> None:
    result = pool.run(both_sides, name, layout, world=2)[0]
    assert result.passed, result


@pytest.mark.parametrize("name", FACTORIES)
def test_the_definition_keeps_what_the_optimizer_keeps(name: str) -> None:
    """Also of rows of several blocks, of rows of zeros, and where a gradient comes later."""
    sizes = {"blocks.0.mlp.up": (3, 300), "head.weight": (5, 7), "norm.weight": (9,)}
    draws = torch.Generator().manual_seed(0)
    sides = []
    for make in (lambda named: plain_optimizer(FACTORIES[name], named), FACTORIES[name]):
        draws.manual_seed(0)
        named = [
            (n, nn.Parameter(torch.randn(size, generator=draws, dtype=torch.float64)))
            for n, size in sizes.items()
        ]
        made: Any = make(named)
        for step in range(5):
            for n, p in named:
                p.grad = torch.randn(p.shape, generator=draws, dtype=torch.float64)
                p.grad[0] = 0.0
                if n == "head.weight" and step < 2:
                    p.grad = None
            made.step()
        kept = {f"{n} {k}": torch.as_tensor(v) for n, p in named for k, v in made.state[p].items()}
        sides.append(kept | {n: p.detach() for n, p in named})
    assert sides[0].keys() == sides[1].keys()
    for key, value in sides[0].items():
        torch.testing.assert_close(value, sides[1][key], rtol=1e-12, atol=1e-14)
