"""Experts spread over ranks, with every other axis, against one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from cases import Subject
from test_context import holds, tokens
from torch import nn

import weft
from weft.errors import Refusal
from weft.launch.processes import Pool
from weft.losses import next_token
from weft.models import decoder

VOCAB = 67


def hugging_face(kind: str) -> nn.Module:
    t = pytest.importorskip("transformers")
    small: dict[str, Any] = {
        "vocab_size": VOCAB, "use_cache": False, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2,
    }  # fmt: skip
    if kind == "mixtral":
        config: Any = t.MixtralConfig(**small, num_local_experts=4)
    elif kind == "qwen3":
        config = t.Qwen3MoeConfig(**small, num_experts=8, moe_intermediate_size=24, head_dim=8)
    elif kind == "olmoe":
        config = t.OlmoeConfig(**small, num_experts=8)
    else:
        config = t.DeepseekV3Config(
            **small | {"num_key_value_heads": 4}, n_routed_experts=8, n_shared_experts=1, n_group=2, topk_group=1,
            moe_intermediate_size=24, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
            qk_nope_head_dim=8, v_head_dim=8,
        )  # fmt: skip
    model: nn.Module = t.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model


def subject(kind: str, recompute: Any = "none", **options: Any) -> Subject:
    build = partial(hugging_face, kind) if not options else partial(decoder, VOCAB, 32, 2, 4, 4, **options)
    return Subject(build, tokens, next_token, (("accumulate", 2), ("recompute", recompute)), 0.1)


GATES: dict[str, dict[str, Any]] = {
    "softmax": {"experts": 4, "hidden": 24, "balance": 0.5, "z": 0.1},
    "sigmoid": {"experts": 8, "active": 3, "shared": 1, "hidden": 24, "gate": "sigmoid", "balance": 0.5, "tied": True},
}


LAYOUTS = [
    "ep2", "ep4", "dp2.ep2", "dp2+ep", "fsdp2+ep", "fsdp2.ep2", "fsdp2+zero1.ep2", "dp2.fsdp2+ep", "cp2+ep",
    "dp2+ep.cp2+ep", "cp2.ep2", "up2+ep.dp2", "pp2.ep2", "pp2.dp2+ep", "ep2.tp2", "dp2+ep.tp2",
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_one_device(pool: Pool, layout: str) -> None:
    holds(pool, subject("mixtral"), layout)


@pytest.mark.parametrize("layout", ["ep2", "fsdp2+ep", "dp2+ep.cp2+ep"])
@pytest.mark.parametrize("kind", ["qwen3", "olmoe", "deepseek"])
def test_every_model(pool: Pool, kind: str, layout: str) -> None:
    holds(pool, subject(kind), layout)


@pytest.mark.parametrize("layout", ["ep2", "fsdp2+ep"])
def test_recomputed(pool: Pool, layout: str) -> None:
    holds(pool, subject("mixtral", "full"), layout)


@pytest.mark.parametrize(
    "layout",
    [
        "dp2",
        "ep2",
        "dp2+ep.cp2+ep",
        "fsdp2.ep2",
        "pp2.ep2",
        "ep2.tp2",
        "ep2.tp2+sequence",
        "tp2+sequence",
        "cp2+ulysses",
    ],
)
@pytest.mark.parametrize("gate", GATES)
def test_a_decoder_with_experts(pool: Pool, gate: str, layout: str) -> None:
    """Its losses that balance the gate are of all tokens of a microbatch, on any layout."""
    holds(pool, subject("", **GATES[gate]), layout)


def test_a_decoder_with_experts_recomputed(pool: Pool) -> None:
    holds(pool, subject("", "full", **GATES["softmax"]), "ep2.cp2")


def skewed() -> nn.Module:
    """All tokens choose the same experts, in the first step."""
    model = hugging_face("mixtral")
    for name, p in model.named_parameters():
        if name.endswith("gate.weight"):
            nn.init.zeros_(p)
    return model


@pytest.mark.parametrize("layout", ["ep2", "ep4", "dp2+ep.cp2+ep"])
def test_where_no_token_comes(pool: Pool, layout: str) -> None:
    holds(pool, Subject(skewed, tokens, next_token, (("accumulate", 2),), 0.1), layout)


@pytest.mark.parametrize(
    ("build", "layout", "says"),
    [
        (partial(decoder, VOCAB, 32, 2, 4), "ep2", "finds no experts"),
        (partial(hugging_face, "mixtral"), "ep3", "4 experts, which do not divide over 3 ranks"),
        (partial(hugging_face, "mixtral"), "dp2+experts", "no option 'experts'. Known: ep"),
    ],
)
def test_refused(build: Any, layout: str, says: str) -> None:
    with pytest.raises(Refusal, match=says):
        weft.plan(build(), layout, batch=12, loss=next_token)


@pytest.mark.parametrize("sync", ["local_sgd", "parameter_server"])
def test_replicas_have_all_experts_to_themselves(sync: str) -> None:
    with pytest.raises(Refusal, match="spreads experts over them"):
        weft.plan(hugging_face("mixtral"), "dp2+ep", batch=12, loss=next_token, sync=sync)
