"""The one-device side makes groups of its own: settings on the wrong parameter are seen."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.cases import LENGTH, VOCAB, Subject
from tests.mutants import Mutant, mutated
from weft.engine import make_optimizer
from weft.nn.freeze import freeze
from weft.nn.models import decoder
from weft.verification.case import Case
from weft.verification.compare import check_layout
from weft.verification.layout_result import LayoutResult
from weft.verification.plain.parameter_groups import plain_optimizer
from weft.verification.reference import run_reference

FACTORY = make_optimizer(
    "adamw",
    lr=1e-2,
    weight_decay=0.3,
    decay_min_dims=2,
    no_decay=["embedding.*"],
    groups={"head.*": {"lr": 3e-3}, "h*": {"lr": 7e-2}, "*.wq.*": {"betas": (0.8, 0.9)}},
)
FROZEN = ("blocks.0.mlp.*",)
DECODER = Subject(partial(decoder, VOCAB, 32, 2, 4, 2, seq_len=LENGTH))


def build() -> Any:
    model = DECODER.case().build()
    freeze(model, FROZEN)
    return model


def case() -> Case:
    return replace(DECODER.case(), optimizer=FACTORY, build=build, frozen=FROZEN)


GROUPS = "weft.engine.optimizer_factory", "OptimizerFactory.settings"
MUTANTS = {
    "norms decay": Mutant(*GROUPS, "dims < self.decay_min_dims", "False"),
    "matrices do not decay": Mutant(*GROUPS, "dims < self.decay_min_dims", "True"),
    "what is named decays": Mutant(
        *GROUPS, "any(fnmatchcase(name, p) for p in self.no_decay)", "0"
    ),
    "the last that matches": Mutant(
        *GROUPS, "self.groups.items()", "reversed(self.groups.items())"
    ),
    "no groups": Mutant(*GROUPS, "**found}", "}"),
    "nothing frozen": Mutant(
        "weft.nn.freeze", "freeze", "requires_grad_(False)", "requires_grad_()"
    ),
}


def both_sides(*mutants: Mutant, layout: str = "dp1") -> LayoutResult:
    with mutated(*mutants):
        return check_layout(case(), layout, run_reference(case(), 2))


@pytest.mark.parametrize("name", MUTANTS)
def test_settings_of_the_wrong_parameter_are_seen(pool: Any, name: str) -> None:
    result = pool.run(both_sides, MUTANTS[name], world=1)[0]
    assert not result.passed, result


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2", "pp2"])
def test_both_sides_make_the_same_groups(pool: Any, layout: str) -> None:
    result = pool.run(partial(both_sides, layout=layout), world=2)[0]
    assert result.passed, result


def test_each_parameter_has_its_settings() -> None:
    named = list(decoder(VOCAB, 32, 2, 4, 2, seq_len=LENGTH).named_parameters())
    found = [
        {
            name: (group["lr"], group["weight_decay"], group["betas"])
            for group in made.param_groups
            for name in group["param_names"]
        }
        for made in (plain_optimizer(FACTORY, named), FACTORY(named))
    ]
    assert found[0] == found[1]
    assert found[0]["head.weight"] == (3e-3, 0.3, (0.9, 0.999))
    assert found[0]["norm.weight"][1] == found[0]["embedding.weight"][1] == 0.0
