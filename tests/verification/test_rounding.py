"""Where a run amplifies rounding, verify holds it to what rounding makes of it; a fault as small is
seen all the same."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases import SUBJECTS, VOCAB, Subject
from tests.mutants import Mutant, mutated
from weft.optimizers import make_optimizer
from weft.verification import verify_case
from weft.verification.case import Case
from weft.verification.compare import check_layout
from weft.verification.difference import Bounds
from weft.verification.layout_result import LayoutResult
from weft.verification.noise import NoiseElements
from weft.verification.reference import run_reference
from weft.verification.report import VerifyReport, result_table
from weft.verification.rounding import MOST, may_be_rounding, measure_rounding, within_rounding
from weft.verification.tensor_errors import saved_state_errors

STEPS = 3
UPDATE = "weft.engine.grad_update"


class KeyBiases(nn.Module):
    """Attention whose keys have a bias, which softmax does not see: its gradient is rounding, of
    which RMSprop makes a step of full size."""

    def __init__(self, dim: int = 32, heads: int = 4, depth: int = 3):
        super().__init__()
        self.embedding, self.heads = nn.Embedding(VOCAB, dim), heads
        self.blocks = nn.ModuleList(
            nn.ModuleDict({n: nn.Linear(dim, dim) for n in ("q", "k", "v", "out")})
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            q, k, v = (
                block[n](x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for n in ("q", "k", "v")
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block["out"](y.transpose(1, 2).flatten(2))
        return self.head(self.norm(x))


def growing() -> Case:
    """In step 2 rounding has come to 1e-8 and more."""
    optimizer: Any = make_optimizer("rmsprop", lr=5e-2)
    return replace(Subject(KeyBiases).case(), optimizer=optimizer)


def steady() -> Case:
    return SUBJECTS["decoder"].case()


class FusedKeys(nn.Module):
    """The same with one linear for queries, keys and values: of its bias, a third is rounding."""

    def __init__(self, dim: int = 16, heads: int = 4, depth: int = 2):
        super().__init__()
        self.embedding, self.heads = nn.Embedding(VOCAB, dim), heads
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"qkv": nn.Linear(dim, 3 * dim), "out": nn.Linear(dim, dim)})
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            parts = block["qkv"](x).chunk(3, -1)
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block["out"](y.transpose(1, 2).flatten(2))
        return self.head(self.norm(x))


class FreeBias(nn.Module):
    """A bias that a batch norm takes away again, and follows."""

    def __init__(self, dim: int = 16):
        super().__init__()
        self.embedding, self.up = nn.Embedding(VOCAB, dim), nn.Linear(dim, dim)
        self.norm, self.head = nn.BatchNorm1d(dim), nn.Linear(dim, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.up(self.embedding(input_ids)).transpose(1, 2)
        return self.head(F.gelu(self.norm(x)).transpose(1, 2))


class OneExpert(nn.Module):
    """A router that chooses one expert, whose weight it makes 1: rounding alone comes to it."""

    def __init__(self, dim: int = 16, count: int = 4):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.router = nn.Linear(dim, count, bias=False)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(count))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        weights, chosen = self.router(x).softmax(-1).topk(1)
        weights = weights / weights.sum(-1, keepdim=True)
        every = torch.stack([expert(x) for expert in self.experts], -2)
        taken = every.gather(-2, chosen[..., None].expand(*chosen.shape, x.shape[-1]))
        return self.head(x + (weights[..., None] * taken).sum(-2))


def in_codes() -> Case:
    optimizer: Any = make_optimizer("adamw8bit", lr=1e-2)
    return replace(Subject(OneExpert).case(), optimizer=optimizer)


def by_sign(model: Any = FusedKeys) -> Case:
    """Lion makes a step of full size of rounding."""
    optimizer: Any = make_optimizer("lion", lr=1e-2, weight_decay=0.1)
    return replace(Subject(model).case(), optimizer=optimizer)


def scaled(factor: str) -> Mutant:
    """The gradients of every step times this."""
    old = "scale_grads(grads.values(), factor)"
    return Mutant(UPDATE, "GradUpdate.__call__", old, f"{old[:-1]} * ({factor}))")


def judged(case: Case, layout: str, *mutants: Mutant) -> tuple[LayoutResult, LayoutResult]:
    """(what verify says at first of a layout with mutants, what it says in the end)."""
    alone = run_reference(case, STEPS)
    with mutated(*mutants):
        result = check_layout(case, layout, alone)
    if not may_be_rounding(result, case, alone):
        return result, result
    return result, within_rounding(result, measure_rounding(case, layout, alone))


def test_rounding_that_grows_is_no_alarm(pool: Any) -> None:
    first, last = pool.run(judged, growing(), "tp2", world=2)[0]
    assert not first.passed and first.beyond, "too small to need a wider bound"
    assert last.passed, last
    assert last.widened.keys() == first.beyond.keys()
    assert all(first.beyond[name] < bound for name, bound in last.widened.items())
    told = result_table(last, STEPS)
    assert "rounding          grows in this run: " in told, told
    report = VerifyReport((last,), STEPS)
    assert "or below the measured rounding where rounding grows" in report.verdict()
    assert '"widened"' in report.json()


def test_a_model_that_is_made_apart_for_one_device_is_moved_too() -> None:
    case = growing()
    reference = run_reference(case, STEPS)
    apart = replace(case, build_plain=case.build)
    measured = measure_rounding(apart, "dp2", reference)
    assert measured == measure_rounding(case, "dp2", reference)
    assert max(measured.values()) > 1e-9


def test_the_command_measures_it() -> None:
    report = verify_case(growing(), ["tp2"], STEPS)
    assert report.passed, report.text()
    assert report.results[0].widened


FAULTS = [(steady, "1.0 + 1e-8"), (steady, "1.0 + 1e-7"), (growing, "1.0 + 3e-9")]


@pytest.mark.parametrize(("case", "factor"), FAULTS)
def test_a_fault_as_small_is_seen(pool: Any, case: Any, factor: str) -> None:
    """It is there from the first step on, where rounding has not grown."""
    first, last = pool.run(judged, case(), "dp2", scaled(factor), world=2)[0]
    assert first.beyond, "too large to be taken for rounding"
    assert not last.passed and not last.widened, last
    assert last.first is not None


def test_a_fault_of_one_weight_is_seen(pool: Any) -> None:
    one = "grads['blocks.0.attention.wq.weight'].mul_(1.0 + 1e-8), scale_grads("
    mutant = Mutant(UPDATE, "GradUpdate.__call__", "scale_grads(", one)
    first, last = pool.run(judged, steady(), "dp2", mutant, world=2)[0]
    assert first.beyond and not last.passed
    assert last.first.startswith("gradient of blocks.0.attention.wq.weight ")


def test_what_is_large_is_not_measured(pool: Any) -> None:
    first, _ = pool.run(judged, growing(), "dp2", scaled("1.0 + 1e-4"), world=2)[0]
    assert first.grad_rel_err > MOST
    assert not first.passed and not first.beyond


def test_what_has_no_error_is_not_measured(pool: Any) -> None:
    """A batch of other samples in the last step differs by itself, whatever its numbers."""
    case = growing()
    other = replace(case, batch=partial(_swapped, case), whole_batch=case.whole_batch_of)
    first, last = pool.run(judged, other, "dp2", world=2)[0]
    assert not first.beyond and not last.passed


def _swapped(case: Case, step: int, data_rank: int, data_size: int) -> Any:
    found = case.batch(step, data_rank, data_size)
    return {key: torch.roll(value, 1, 0) if step else value for key, value in found.items()}


@pytest.mark.parametrize("model", [FusedKeys, KeyBiases, FreeBias])
def test_signs_of_rounding_are_no_alarm(model: Any) -> None:
    report = verify_case(by_sign(model), ["dp2"], STEPS)
    assert report.passed, report.text()
    alone = [name for name in report.results[0].widened if "elements of rounding alone" in name]
    assert alone
    if model is FusedKeys:
        assert all(".qkv.bias (16 elements of rounding alone) after" in name for name in alone)
    assert "elements of rounding alone) after" in report.text()


LION = "weft.engine.lion", "_update", "torch._foreach_add_(weights, steps, alpha=-lr)"
OF_A_BIAS = "grads['blocks.0.qkv.bias']"
BESIDE: dict[str, tuple[Mutant, str]] = {
    # what is left of a fused bias has gradients as any other weight
    "gradients of queries": (
        Mutant(
            UPDATE,
            "GradUpdate.__call__",
            "scale_grads(",
            f"{OF_A_BIAS}[:16].mul_(1.0 + 1e-8), scale_grads(",
        ),
        "gradient of blocks.0.qkv.bias (",
    ),
    "weights of queries": (
        Mutant(*LION, f"{LION[2]}; [w[:16].mul_(1.0 + 1e-6) for w in weights if w.shape == (48,)]"),
        "blocks.0.qkv.bias after step 0",
    ),
    "weights of keys, further than rounding takes them": (
        Mutant(*LION, f"{LION[2]}; [w[16:32].add_(1.0) for w in weights if w.shape == (48,)]"),
        "blocks.0.qkv.bias (16 elements of rounding alone) after step 0",
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_beside_them_a_fault_is_seen(pool: Any, name: str) -> None:
    mutant, seen = BESIDE[name]
    _, last = pool.run(judged, by_sign(), "dp2", mutant, world=2)[0]
    assert not last.passed and last.first.startswith(seen), last


def test_exact_zeros_are_judged() -> None:
    """A row of an embedding that no token has is not what rounding left."""
    found = NoiseElements()
    rows, keys = torch.ones(3, 4), torch.ones(4)
    rows[1], keys[2:] = 0.0, torch.tensor([0.0, 1e-16])
    found.add({"rows": rows, "keys": keys, "bias": torch.full((2,), 1e-15)}, 1e4)
    assert {name: mask.tolist() for name, mask in found.masks().items()} == {
        "keys": [False, False, True, True],
        "bias": [True, True],
    }
    found.add({"rows": rows, "keys": torch.ones(4), "bias": torch.zeros(2)}, 1e4)
    assert found.masks().keys() == {"bias"}


def test_codes_of_rounding_are_no_alarm(pool: Any) -> None:
    """They stand for next to nothing, whatever they are."""
    first, _ = pool.run(judged, in_codes(), "dp2", world=2)[0]
    assert first.passed, first


CODES = "weft.engine.adamw8bit"


@pytest.mark.parametrize(
    ("old", "new", "seen"),
    [
        ("codes.clamp_(", "codes[0, :1] += 1; codes.clamp_(", "/exp_avg_sq after"),
        ('_scale": scale}', '_scale": scale * (1 + 1e-8)}', "_scale after"),
    ],
)
def test_other_codes_are_seen(pool: Any, old: str, new: str, seen: str) -> None:
    """Of the last step, which changes no weight."""
    mutant = Mutant(CODES, "_store", old, new)
    first, _ = pool.run(judged_after_one, in_codes(), "dp2", mutant, world=2)[0]
    assert not first.passed and first.first is not None
    assert first.first.startswith("optimizer/") and seen in first.first, first


def judged_after_one(case: Case, layout: str, *mutants: Mutant) -> tuple[LayoutResult, int]:
    alone = run_reference(case, 1)
    with mutated(*mutants):
        return check_layout(case, layout, alone), 0


def test_what_is_kept_of_a_weight_follows_that_weight() -> None:
    """Another weight's rounding is no reason to look less closely."""
    final = {n: torch.ones(4) for n in ("a", "b", "outer/a/momentum", "outer/b/momentum")}
    saved = {n: t * (1.1 if n.startswith("outer/") else 1.0) for n, t in final.items()}
    noise = {"b": torch.ones(4, dtype=torch.bool)}
    found = saved_state_errors(saved, final, ["a", "b"], noise, Bounds())
    assert found["outer/a/momentum"] == pytest.approx(0.1)
    assert found["outer/b/momentum (4 elements of rounding alone)"] == pytest.approx(1e-4)
