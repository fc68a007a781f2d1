"""In bf16 every layout equals one device within a few roundings, and sends what was predicted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.cases import BATCH, LENGTH, VOCAB, Fused, Subject, batch_of, global_batch, images
from tests.mutants import Mutant, mutated
from tests.verification.test_parity import transformer
from weft.core.errors import ConfigError
from weft.nn.losses import classification, next_token, vocab_parallel
from weft.nn.models import convnet, decoder
from weft.verification.case import Case
from weft.verification.compare import check_layout
from weft.verification.layout_result import LayoutResult
from weft.verification.reference import Reference, run_reference
from weft.verification.verify_model import verify

UPDATE = "weft.engine.grad_update"
tiny = partial(decoder, VOCAB, 32, 2, 4, 2, seq_len=LENGTH)
SUBJECTS = {
    "decoder": Subject(tiny),
    "tied": Subject(partial(decoder, VOCAB, 32, 2, 4, 4, seq_len=LENGTH, tied=True)),
    "experts": Subject(partial(tiny, experts=4, bias=0.01)),
    "recomputed": Subject(tiny, plan=(("accumulate", 2), ("recompute", "full"))),
    "bf16 sums": Subject(tiny, plan=(("accumulate", 2), ("reduce", "bf16"))),
    "fused": Subject(Fused),
    "convnet": Subject(partial(convnet, 8, 5), images, classification),
    "llama": Subject(partial(transformer, "llama")),
    "gpt2": Subject(partial(transformer, "gpt2")),
}
LAYOUTS = {
    "decoder": [
        *("dp1", "dp2", "fsdp2", "fsdp2+zero1", "fsdp2+zero2", "fsdp2+offload", "dp2.fsdp2"),
        *("tp2", "tp4+sequence", "fsdp2.tp2+sequence", "vp2", "cp2", "cp2+gather", "ulysses2"),
        *("pp2", "pp2+zb-v", "pp2.fsdp2", "pp2.tp2", "dp2.cp2"),
    ],
    "tied": ["dp2", "fsdp2.tp2", "pp2"],
    "experts": ["dp2", "fsdp2", "ep2", "dp2+ep", "fsdp2+ep", "pp2"],
    "recomputed": ["fsdp2", "tp2+sequence"],
    "bf16 sums": ["dp2", "fsdp2", "dp2.fsdp2", "tp2+sequence"],
    "fused": ["dp2", "tp2+sequence"],
    "convnet": ["dp2", "fsdp2", "pp2"],
    "llama": ["dp2", "fsdp2", "tp2+sequence", "pp2", "cp2"],
    "gpt2": ["dp2", "fsdp2", "tp2", "pp2"],
}
GRID = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]


def single(build: Any) -> nn.Module:
    torch.manual_seed(0)
    return build()


def laid(subject: Subject, model: nn.Module, layout: str, precision: str = "bf16") -> weft.Plan:
    arguments = dict(subject.plan)
    if layout == "dp1":
        arguments.pop("recompute", None)
    sample = {key: value[:2] for key, value in global_batch(subject, 0).items()}
    given: dict[str, Any] = {"loss": subject.loss, "sample": sample, **arguments}
    return weft.plan(model, layout, batch=BATCH, precision=precision, **given)


def case(subject: Subject, precision: str = "bf16") -> Case:
    return Case(
        build=partial(single, subject.build),
        plan=partial(laid, subject, precision=precision),
        batch=partial(batch_of, subject),
        loss=subject.loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        precision=precision,
    )


@cache
def reference(name: str) -> Reference:
    return run_reference(case(SUBJECTS[name]), 1)


def run(pool: Any, name: str, layout: str) -> LayoutResult:
    world = weft.Layout.parse(layout).world
    found = pool.run(check_layout, case(SUBJECTS[name]), layout, reference(name), world=world)[0]
    assert isinstance(found, LayoutResult)
    return found


@pytest.mark.grid
@pytest.mark.parametrize(("name", "layout"), GRID)
def test_a_layout_in_bf16_equals_one_device(pool: Any, name: str, layout: str) -> None:
    result = run(pool, name, layout)
    assert result.passed, result
    assert layout == "dp1" or result.comms_seen


FP16 = ["dp1", "dp2", "fsdp2", "tp2+sequence", "pp2", "fsdp2.tp2", "cp2"]


@pytest.mark.parametrize("layout", FP16)
def test_a_layout_in_fp16_equals_one_device(pool: Any, layout: str) -> None:
    """Also in a step that overflows."""
    of = case(SUBJECTS["decoder"], "fp16")
    world = weft.Layout.parse(layout).world
    result = pool.run(check_layout, of, layout, run_reference(of, 1), world=world)[0]
    assert result.passed, result


def with_mutant(mutant: Mutant, of: Case, alone: Reference) -> LayoutResult:
    with mutated(mutant):
        return check_layout(of, "dp2", alone)


@pytest.mark.parametrize(
    ("function", "old", "new", "said"),
    [
        ("LossScale.take", "return finite", "return True", "overflow, was taken"),
        ("LossScale.take", "self.value / 2", "self.value / 4", "after an overflow at"),
        ("GradUpdate.__call__", "weight * self.loss_scale.value", "weight", "every gradient"),
    ],
)
def test_a_fault_of_the_loss_scale_is_named(
    pool: Any, function: str, old: str, new: str, said: str
) -> None:
    of, mutant = case(SUBJECTS["decoder"], "fp16"), Mutant(UPDATE, function, old, new)
    result = pool.run(with_mutant, mutant, of, run_reference(of, 1), world=2)[0]
    assert said in f"{result.first} {result.problem}", result


def in_bytes(layout: str, precision: str, reduce: str = "fp32") -> dict[tuple[str, str], int]:
    """What a step is seen to send."""
    e = weft.Engine(
        single(tiny),
        weft.plan(
            single(tiny), layout, batch=BATCH, loss=next_token, precision=precision, reduce=reduce
        ),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=next_token,
        device="cpu",
    )
    e.trial = None  # its collectives come once, before the first step
    with weft.engine.Audit(e.mesh) as audit:
        e.step(e.local(global_batch(SUBJECTS["decoder"], 0)))
    found: dict[tuple[str, str], int] = {}
    for comm in audit.seen:
        found[comm.kind, comm.axis] = found.get((comm.kind, comm.axis), 0) + comm.nbytes
    return found


def test_fsdp_gathers_half_the_bytes(pool: Any) -> None:
    full = pool.run(in_bytes, "fsdp2", "fp32", world=2)[0]
    low = pool.run(in_bytes, "fsdp2", "bf16", world=2)[0]
    least = pool.run(in_bytes, "fsdp2", "bf16", "bf16", world=2)[0]
    gathers, sums = ("all_gather", "fsdp"), ("reduce_scatter", "fsdp")
    assert 2 * low[gathers] == 2 * least[gathers] == full[gathers]
    assert low[sums] == 2 * least[sums] == full[sums]


def test_tp_sends_half_the_bytes_and_dp_the_chosen(pool: Any) -> None:
    full, low = (pool.run(in_bytes, "tp2+sequence", p, world=2)[0] for p in ("fp32", "bf16"))
    for kind in ("all_gather", "reduce_scatter"):
        assert 2 * low[kind, "tp"] == full[kind, "tp"]
    sums = "all_reduce", "dp"
    low, least = (
        pool.run(in_bytes, "dp2", "bf16", reduce, world=2)[0] for reduce in ("fp32", "bf16")
    )
    assert low[sums] - 48 == 2 * (least[sums] - 48)


@vocab_parallel
def doubled(output: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    total, weight = next_token(output, batch)
    return total + 0.1 * (total - total.detach()), weight


def test_a_gradient_that_is_wrong_by_a_tenth_is_found(pool: Any) -> None:
    wrong = replace(case(SUBJECTS["decoder"]), loss=doubled)
    result = pool.run(check_layout, wrong, "dp2", reference("decoder"), world=2)[0]
    assert not result.passed and "gradient" in result.first


def test_verify_in_bf16() -> None:
    batch = global_batch(SUBJECTS["decoder"], 0)
    found = verify(tiny, "fsdp2", batch, loss=next_token, steps=1, precision="bf16")
    assert found.passed and "in bf16" in found.verdict(), found.text()


def test_what_is_not_verified_in_bf16_is_refused() -> None:
    batch = global_batch(SUBJECTS["decoder"], 0)
    with pytest.raises(ConfigError, match="is not a precision in which verify runs"):
        verify(tiny, "dp2", batch, loss=next_token, precision="fp8")
    adam = partial(torch.optim.Adam, lr=1e-3)
    with pytest.raises(ConfigError, match=r"Adam.*verified with SGD.*leave it out"):
        verify(tiny, "dp2", batch, loss=next_token, precision="bf16", optimizer=adam)
    with pytest.raises(ConfigError, match="updates weights with a delay"):
        verify(tiny, "pp2+pipedream", batch, loss=next_token, precision="bf16")
