"""The one-device side makes groups of its own: settings on the wrong parameter are seen."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cases import LENGTH, VOCAB, Subject
from tests.mutants import Mutant, mutated
from weft.core import load_run
from weft.engine import make_optimizer
from weft.nn.freeze import freeze
from weft.nn.models import decoder
from weft.verification.case import Case
from weft.verification.compare import check_layout
from weft.verification.layout_result import LayoutResult
from weft.verification.plain.parameter_groups import plain_optimizer
from weft.verification.reference import run_reference
from weft.verification.verify_run import make_case

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


RUN = """
[model]
build = "weft.models:decoder"
vocab = 67
dim = 32
layers = 2
heads = 4
seq_len = 12
[data]
build = "tests.verification.test_training_proof:Padded"
[train]
batch = 4
steps = 4
[optimizer]
name = "adamw"
lr = 1e-2
betas = [0.8, 0.9]
no_decay = ["norm.*"]
decay_min_dims = 1
groups = { "head.*" = { betas = [0.7, 0.9] } }
"""
BUILD, MAKE = ("weft.train.build", "build_optimizer"), (GROUPS[0], "make_optimizer")
LOST = {
    "arguments": Mutant(*BUILD, "**table.arguments", "lr=1e-3"),
    "groups": Mutant(*BUILD, "groups=table.groups", "groups={}"),
    "no_decay": Mutant(*MAKE, "tuple(no_decay)", "()"),
    "decay_min_dims": Mutant(*BUILD, "decay_min_dims=table.decay_min_dims", "decay_min_dims=0"),
    "name": Mutant(*BUILD, "str(table.name)", '"adam"'),
}


def faults_of(folder: Path, *mutants: Mutant) -> list[str]:
    path = folder / "run.toml"
    path.write_text(RUN)
    with mutated(*mutants):
        return list(make_case(load_run(path)).faults())


@pytest.mark.parametrize("key", LOST)
def test_settings_that_are_lost_on_the_way_are_seen(tmp_path: Path, key: str) -> None:
    assert faults_of(tmp_path) == []
    (fault,) = faults_of(tmp_path, LOST[key])
    assert fault.startswith(f"[optimizer] {key}: ")
