"""Which linears of a model multiply in float8 under a layout, and what a plan says of the rest."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.core import ConfigError, emulate_float8
from weft.nn.losses import next_token
from weft.nn.models import convnet, decoder

tiny = partial(decoder, 64, 64, 2, 4, 2, seq_len=16)


def planned(build: Any, layout: str, recipe: str = "rowwise", **plan: Any) -> weft.Plan:
    with torch.device("meta"):
        model = build()
    sample = {"input_ids": torch.zeros(2, 16, dtype=torch.long)}
    given = {"loss": next_token, "precision": "bf16", "sample": sample} | plan
    return weft.plan(model, layout, batch=8, float8=recipe, **given)


class Gated(nn.Module):
    """Tokens go to experts by a gate that is a linear; beside it, what no role knows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.norm = nn.Linear(32, 16, bias=False), nn.LayerNorm(32)
        self.experts = SixteenExperts()
        self.attention = nn.MultiheadAttention(32, 2)
        self.odd, self.even = nn.Linear(32, 40), nn.Linear(32, 32)
        self.own = Shifted(32, 32)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Shifted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class SixteenExperts(nn.Module):
    num_experts = 16

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(16, 64, 32))
        self.down = nn.Parameter(torch.empty(16, 32, 64))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return x


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.before = nn.Embedding(64, 32), nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Gated() for _ in range(2))
        self.head = nn.Linear(32, 64)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.before(self.embedding(input_ids)))


def test_every_other_linear_has_a_reason() -> None:
    found = planned(Mixed, "dp2").float8
    assert found is not None and found.linears == ("blocks.0.even", "blocks.1.even")
    assert {name: why for name, why in found.others if "blocks.1" not in name} == {
        "before": "outside of the repeated blocks",
        "blocks.0.gate": "a gate of experts",
        "blocks.0.attention.out_proj": "it is not nn.Linear's forward that multiplies",
        "blocks.0.odd": "32 to 40 features are not multiples of 16",
        "blocks.0.own": "it is not nn.Linear's forward that multiplies",
        "blocks.0.normed": "a parametrization makes its weight",
        "head": "the output head",
    }


def test_a_plan_says_so() -> None:
    text = str(planned(tiny, "tp2"))
    assert "float8 rowwise: 14 of 15 linears, by torchao" in text
    assert "float8         blocks.*.attention.wq [2]" in text
    assert "bf16           head                       the output head" in text
    assert "emulated" not in text
    assert "emulated in float32" in str(emulate_float8(planned(tiny, "tp2")))
    assert "float8" not in str(planned(tiny, "tp2", "off"))


@pytest.mark.parametrize(
    ("layout", "left"),
    [
        ("tp2", {}),  # of 32 features of keys each rank has 16
        ("tp4", {}),  # there are 2 heads of keys, of which each rank reads one
        ("fsdp2", {}),  # a linear is whole when it multiplies
        ("pp2", {}),
    ],
)
def test_a_rank_multiplies_what_it_has(layout: str, left: dict[str, str]) -> None:
    found = planned(tiny, layout).float8
    assert found is not None and dict(found.others).keys() - {"head"} == left.keys()


def test_a_cut_that_leaves_no_multiple_of_16_stays_in_bf16() -> None:
    found = planned(partial(decoder, 64, 32, 2, 4, 2, hidden=64, seq_len=16), "tp4").float8
    assert found is not None
    said = "tp4 leaves a rank 8 of 32 features, no multiple of 16"
    assert dict(found.others)["blocks.0.attention.wq"] == said
    assert dict(found.others)["blocks.0.attention.wo"] == said
    assert {name.partition("mlp")[1] for name in found.linears} == {"mlp"}


def test_a_stage_has_its_own_linears() -> None:
    plan = planned(tiny, "pp2")
    first, second = (plan.of(rank).float8 for rank in range(2))
    assert first is not None and second is not None and plan.float8 is not None
    assert sorted(first.linears + second.linears) == sorted(plan.float8.linears)
    assert dict(first.others) == {} and dict(second.others).keys() == {"head"}


def test_a_backward_in_two_parts_is_said_to_be_computed_twice() -> None:
    given = {"accumulate": 4}
    assert any("B and W each" in note for note in planned(tiny, "pp2+zb-h1", **given).notes)
    assert not any("B and W each" in note for note in planned(tiny, "pp2", **given).notes)


@pytest.mark.parametrize(
    ("recipe", "plan", "said"),
    [
        ("row", {}, "is not a recipe. Choose one of off, rowwise, rowwise_with_gw_hp, tensorwise"),
        ("rowwise", {"precision": "fp32"}, "computes in fp32"),
        ("tensorwise", {"precision": "fp16"}, 'Use it with compute = "bf16"'),
    ],
)
def test_what_cannot_be_is_refused(recipe: str, plan: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        planned(tiny, "dp2", recipe, **plan)
    assert refused.value.field == "precision.float8" and refused.value.value == recipe


def test_a_model_without_such_linears_is_refused() -> None:
    with pytest.raises(ConfigError, match="no linear of this model can multiply in float8"):
        planned(partial(convnet, 8, 5), "dp2", loss=None, sample=None)
