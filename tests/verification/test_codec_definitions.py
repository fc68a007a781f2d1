"""A run with a lossy codec equals its own sequential definition, and a change of weft's codecs, of
their error feedback or of their sums is seen."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import weft
from tests.engine.test_sync import with_sync
from tests.mutants import Mutant, mutated
from weft import sync
from weft.core.errors import ConfigError
from weft.launch.local_workers import Pool
from weft.sync.codecs import registry
from weft.verification.case import Case
from weft.verification.coded_reference import run_coded
from weft.verification.compare import check_layout
from weft.verification.layout_result import LayoutResult
from weft.verification.plain.codecs import DEFINED
from weft.verification.verify_model import verify_case

STEPS = 3
TOPK = {"name": "topk", "density": 0.1}
DGC = {"name": "dgc", "density": 0.1, "clip": 0.5, "warmup": 2}
POWER = {"name": "powersgd", "rank": 2}
RANDOM = {"name": "int8", "stochastic": True}
KEPT = {"name": "bf16", "feedback": True}
BUCKETS = {"bucket_mb": 0.01}


def case_of(codec: Any, route: str = "allreduce", name: str = "decoder", **options: Any) -> Case:
    case = with_sync(name, sync.make_sync(route, codec, **options)).case()
    dgc = isinstance(codec, dict) and codec["name"] == "dgc"
    return replace(case, optimizer=partial(torch.optim.SGD, lr=0.3)) if dgc else case


def test_every_codec_has_a_definition() -> None:
    assert registry().keys() - {"identity"} == DEFINED


RUNS = [
    *((codec, "allreduce", "dp2", {}) for codec in ("bf16", "fp16", KEPT, "int8", TOPK, POWER)),
    *((codec, "allreduce", "dp4", BUCKETS) for codec in ("int4", RANDOM, "sign", DGC, "bf16")),
    ("int4", "ring", "dp4", {"local": 2}),
    (RANDOM, "central", "dp4", {}),
    (POWER, "parameter_server", "dp2.tp2", {"servers": 2}),
    ("sign", "allreduce", "dp2.tp2+sequence", BUCKETS),
    (DGC, "allreduce", "dp2.fsdp2", {}),
    ("int8", "allreduce", "pp2.dp2", {}),
    (TOPK, "allreduce", "dp2.cp2+ulysses", {}),
    ("sign", "allreduce", "fsdp2", {}),
    (RANDOM, "allreduce", "fsdp4+zero2", {}),
    ("int4", "allreduce", "fsdp2+zero1", {}),
    ("fp16", "allreduce", "pp2.fsdp2", {}),
]


@pytest.mark.grid(4, ci=4)
@pytest.mark.parametrize(("codec", "route", "layout", "options"), RUNS, ids=str)
def test_equals_its_definition(
    pool: Pool, codec: Any, route: str, layout: str, options: dict
) -> None:
    case = case_of(codec, route, "deep" if "pp" in layout else "decoder", **options)
    definition = run_coded(case, layout, STEPS)
    world = weft.Layout.parse(layout).world
    result = pool.run(check_layout, case, layout, definition, world=world)[0]
    assert result.passed, result
    exact = codec not in ("bf16", "fp16") or world == 2
    assert max(result.grad_rel_err, result.param_rel_err) < (1e-9 if exact else 0.02), result


def test_dropout_and_clipping(pool: Pool) -> None:
    case = replace(case_of("int8", name="dropout"), clip=0.1)
    result = pool.run(check_layout, case, "dp2", run_coded(case, "dp2", STEPS), world=2)[0]
    assert result.passed, result


CODEC, BUCKET, BLOCKS = "weft.core.codec", "weft.engine.grad_update", "weft.sync.codecs"
SEND, KEEP = 'x.add_(state["residual"])', 'torch.sub(x, own, out=state["residual"])'
MUTANTS: dict[str, tuple] = {
    "feedback dropped": ("int8", "dp2", CODEC, "MessageCodec.reduce", KEEP, "pass"),
    "feedback never sent": ("int4", "dp2", CODEC, "MessageCodec.reduce", SEND, "pass"),
    "residual added twice": (
        "sign",
        "dp2",
        CODEC,
        "MessageCodec.reduce",
        SEND,
        'x.add_(state["residual"], alpha=2)',
    ),
    "residual of the wrong sign": (
        TOPK,
        "dp2",
        CODEC,
        "MessageCodec.reduce",
        KEEP,
        'torch.sub(own, x, out=state["residual"])',
    ),
    "mean in place of a sum": (
        "int8",
        "dp2",
        CODEC,
        "MessageCodec._add",
        "else out.add_(part)",
        "else out.add_(part).div_(peers.size)",
    ),
    "own message not added": (
        "int8",
        "dp2",
        CODEC,
        "MessageCodec._add",
        "own if rank == peers.index",
        "own * 0 if rank == peers.index",
    ),
    "error of the second encoding lost": (
        "int4",
        "dp4",
        CODEC,
        "MessageCodec._in_parts",
        "error[peers.index] +=",
        "error[peers.index] + ",
    ),
    "every rank's draws the same": (
        RANDOM,
        "dp2",
        CODEC,
        "MessageCodec.generator",
        " {peers.index}",
        "",
    ),
    "every call's draws the same": (
        RANDOM,
        "dp2",
        CODEC,
        "MessageCodec.generator",
        'state["calls"] += 1',
        'state["calls"] += 0',
    ),
    "rounded down": (
        "int8",
        "dp2",
        f"{BLOCKS}.block_quantize",
        "BlockQuantize.encode",
        "steps.round_()",
        "steps.floor_()",
    ),
    "half of the levels": (
        "int4",
        "dp2",
        f"{BLOCKS}.block_quantize",
        "BlockQuantize.encode",
        "2 ** (self.bits - 1) - 1",
        "2 ** (self.bits - 2) - 1",
    ),
    "largest in place of mean": (
        "sign",
        "dp2",
        f"{BLOCKS}.sign",
        "Sign.encode",
        "torch.linalg.vector_norm(blocks, 1, dim=-1) / counts",
        "torch.linalg.vector_norm(blocks, torch.inf, dim=-1)",
    ),
    "one element too few": (
        TOPK,
        "dp2",
        f"{BLOCKS}.topk",
        "TopK.count",
        "round(self.density * n)",
        "round(self.density * n) - 1",
    ),
    "no momentum correction": (
        DGC,
        "dp2",
        f"{BLOCKS}.dgc",
        "DGC.reduce",
        "residual.add_(momentum)",
        "residual.add_(x)",
    ),
    "no factor masking": (
        DGC,
        "dp2",
        f"{BLOCKS}.dgc",
        "DGC.reduce",
        "momentum[places] = 0",
        "pass",
    ),
    "not clipped": (
        DGC,
        "dp2",
        f"{BLOCKS}.dgc",
        "DGC.reduce",
        "if self.clip is not None",
        "if False",
    ),
    "no warm-up": (DGC, "dp2", f"{BLOCKS}.dgc", "DGC.count", "if step < self.warmup", "if False"),
    "no warm start": (
        POWER,
        "dp2",
        f"{BLOCKS}.powersgd",
        "PowerSGD.reduce",
        "torch.mm(matrix, right, out=left)",
        "torch.mm(matrix, torch.ones_like(right) + right[:1], out=left)",
    ),
    "the same first factors in every bucket": (
        POWER,
        "dp2",
        f"{BLOCKS}.powersgd",
        "PowerSGD.state",
        "generator_of(bucket,",
        'generator_of("",',
    ),
    "not orthogonal": (
        POWER,
        "dp2",
        f"{BLOCKS}.powersgd",
        "PowerSGD.reduce",
        "torch.linalg.qr(left).Q",
        "left / left.norm(dim=0)",
    ),
    "low rank without feedback": (
        POWER,
        "dp2",
        f"{BLOCKS}.powersgd",
        "PowerSGD.reduce",
        "matrix.add_(residual)",
        "pass",
    ),
    "cast without feedback": (
        KEPT,
        "dp2",
        f"{BLOCKS}.cast",
        "Cast._short",
        'x.add_(state["residual"])',
        "pass",
    ),
    "scattered without feedback": (
        "int4",
        "fsdp2",
        CODEC,
        "MessageCodec.scatter",
        ".copy_(error[:, :n])",
        ".copy_(0 * error[:, :n])",
    ),
    "same draws in every bucket": (
        RANDOM,
        "fsdp2",
        CODEC,
        "MessageCodec.generator",
        " {peers.bucket}",
        "",
    ),
    "same draws in every call": (
        RANDOM,
        "dp2",
        CODEC,
        "MessageCodec.generator",
        "int(state['calls'])",
        "0",
    ),
    "divided once more": (
        "int8",
        "dp2",
        BUCKET,
        "GradUpdate.__call__",
        "self.plan.batch / (weight",
        "0.5 * self.plan.batch / (weight",
    ),
}


def both_sides(mutant: Mutant, case: Case, layout: str) -> LayoutResult:
    """The definition and the layout, both with the mutant."""
    with mutated(mutant):
        return check_layout(case, layout, run_coded(case, layout, STEPS))


@pytest.mark.grid(6, ci=6)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_change_is_seen(pool: Pool, name: str) -> None:
    codec, layout, *mutant = MUTANTS[name]
    world = weft.Layout.parse(layout).world
    result = pool.run(both_sides, Mutant(*mutant), case_of(codec), layout, world=world)[0]
    assert not result.passed, result


def test_what_the_report_says() -> None:
    report = verify_case(case_of("int4"), ["dp2", "dp1"])
    assert report.passed, report.text()
    assert "equal to its own sequential definition on one device" in report.text()
    assert "allreduce, gradients in int4 (feedback True, bits 4, size 128" in report.text()
    assert report.results[1].definition == ""  # one replica has nothing to send


def test_what_no_definition_tells_is_refused(pool: Pool) -> None:
    """Batch norms that mix replicas; and signs of what is rounding alone: a bias before a norm."""
    with pytest.raises(
        ConfigError, match="the model's batch norms take the samples of all replicas"
    ):
        run_coded(case_of("int8", name="convnet"), "dp2", STEPS)
    with pytest.raises(ConfigError, match="numbers that are only rounding"):
        run_coded(before_a_norm(), "dp2", STEPS)


class BeforeANorm(torch.nn.Module):
    """A bias that its layer norm takes away again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(6, 6), torch.nn.LayerNorm(6)
        self.shift = torch.nn.Parameter(torch.tensor(0.3))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(input) + self.shift)


def before_a_norm() -> Case:
    from tests.engine.test_outer_optimizer import EVEN

    plan = (("accumulate", 2), ("sync", sync.make_sync("allreduce", "sign")))
    return replace(EVEN, build=BeforeANorm, plan=plan).case()
