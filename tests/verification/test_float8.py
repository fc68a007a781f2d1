"""With float8 emulated, every layout equals one device within a few of its roundings, and sends
what was predicted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import weft
from tests.cases import BATCH, LENGTH, VOCAB, Fused, Subject, batch_of, global_batch
from tests.verification.test_parity import transformer
from weft.cli.app import app
from weft.core import CompileOptions, ConfigError, emulate_float8
from weft.nn.losses import next_token, vocab_parallel
from weft.nn.models import decoder
from weft.verification.case import Case
from weft.verification.compare import check_layout
from weft.verification.difference import BOUNDS
from weft.verification.layout_result import LayoutResult
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
    "llama": ["fsdp2", "pp2"],
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
    return emulate_float8(plan)


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
    assert result.passed, result
    assert layout == "dp1" or result.comms_seen


KEPT = ["dp2", "fsdp2", "dp2.fsdp2", "pp2", "pp2+zb-v", "pp2.fsdp2"]


@pytest.mark.grid
@pytest.mark.parametrize("layout", KEPT)
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_scales_of_rows_are_powers_of_two_that_change_no_rounding(
    pool: Any, recipe: str, layout: str
) -> None:
    """Where ranks do not part the features of a token, they agree as closely as in bf16."""
    result = run(pool, "decoder", layout, recipe)
    bounds = BOUNDS["bf16"]
    assert result.loss_rel_err < bounds.loss
    assert result.grad_rel_err < bounds.gradient and result.param_rel_err < bounds.weight


@vocab_parallel
def doubled(output: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    total, weight = next_token(output, batch)
    return total + (total - total.detach()), weight


def test_a_gradient_that_is_twice_as_large_is_found(pool: Any) -> None:
    wrong = replace(case(SUBJECTS["decoder"], "tensorwise"), loss=doubled)
    held_to = reference("decoder", "tensorwise")
    result = pool.run(check_layout, wrong, "dp2", held_to, world=2)[0]
    assert not result.passed and "gradient" in result.first


@pytest.mark.parametrize(
    ("layout", "again"), [("tp2+sequence", "none"), ("fsdp2", "full"), ("pp2", "none")]
)
def test_compiled_blocks_equal_one_device(pool: Any, layout: str, again: str) -> None:
    subject = Subject(
        partial(decoder, VOCAB, 64, 3, 4, 2, seq_len=LENGTH),
        plan=(("accumulate", 2), ("recompute", again)),
    )
    plain = case(subject, "rowwise")
    made = replace(plain, compile=CompileOptions(backend="aot_eager"))
    held_to = run_reference(plain, 4)
    result = pool.run(compiled_layout, made, layout, held_to, world=2)[0]
    assert result.passed, result
    found = result.compiled
    assert found is not None and found.graphs and found.breaks == found.recompilations == 0


def compiled_layout(case: Case, layout: str, held_to: Reference) -> LayoutResult:
    torch.compiler.reset()
    return check_layout(case, layout, held_to)


# ---- weft.verify and weft verify -----------------------------------------------------------------


def test_verify_in_float8() -> None:
    batch = global_batch(SUBJECTS["decoder"], 0)
    plan = weft.plan(
        tiny(), "tp2", batch=BATCH, loss=next_token, precision="bf16", float8="rowwise"
    )
    for precision in ("float8", "bf16", "fp64"):
        found = weft.verify(tiny, plan, batch, loss=next_token, steps=1, precision=precision)
        said = "float64" if precision == "fp64" else precision
        assert found.passed and f"in {said}" in found.verdict(), found.text()
    bare = weft.plan(tiny(), "tp2", batch=BATCH, loss=next_token, precision="bf16")
    with pytest.raises(ConfigError, match="multiplies nothing in float8"):
        weft.verify(tiny, bare, batch, loss=next_token, precision="float8")


RUN = """
[model]
build = "weft.models:decoder"
dim = 32
heads = 2
layers = 1
seq_len = 16
[data]
build = "weft.data:stdlib"
seq_len = 16
max_bytes = 100000
[layout]
axes = "dp2"
[train]
batch = 8
steps = 2
threads = 1
[optimizer]
lr = 1e-3
[precision]
compute = "bf16"
float8 = "rowwise"
"""


@pytest.mark.parametrize("precision", ["fp64", "bf16", "float8"])
def test_a_run_with_float8_is_verified(tmp_path: Path, precision: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    ran = CliRunner().invoke(app, ["verify", str(file), "--precision", precision])
    assert ran.exit_code == 0, ran.output
    left_out = "float8 = 'rowwise' is left out" in ran.output
    assert left_out == (precision != "float8")


def test_a_run_without_float8_is_not_verified_in_it(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN.replace('float8 = "rowwise"', ""))
    ran = CliRunner().invoke(app, ["verify", str(file), "--precision", "float8"])
    assert ran.exit_code == 2 and "set [precision] float8" in ran.output.lower()
