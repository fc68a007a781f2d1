"""Every model under every layout equals one device, and its collectives are those predicted.

Each case is one run of `weft.verification.check` in the pool: loss, every gradient of every step,
weights, buffers and optimizer state after the last step, below 1e-9 in float64.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.cases import (
    BATCH,
    LENGTH,
    VOCAB,
    Subject,
    images,
    in_turn,
    laid,
    reference,
    seeded,
    tokens,
)
from weft.core.errors import UnsupportedModel
from weft.nn.losses import classification, mse, next_token
from weft.nn.models import convnet, decoder
from weft.verification.compare import check_layout
from weft.verification.layout_result import LayoutResult

STEPS = 2


class Perceptron(nn.Module):
    """A plain MLP, its linears in a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3)
        )

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features)


class ViTBlock(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.num_heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * dim, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, -1))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Patches, blocks whose heads are a stored number, and a classifier on the mean: attention flat
    in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 16, 4, 4)
        self.position = nn.Parameter(torch.randn(1, 4, 16) * 0.02)
        self.blocks = nn.Sequential(*[ViTBlock(16, 4) for _ in range(2)])
        self.classes = nn.Linear(16, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2) + self.position
        return self.classes(self.blocks(x).mean(1))


class Unreached(nn.Module):
    """A parameter that no sample reaches, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)

    def forward(self, features: Tensor) -> Tensor:
        return self.used(self.frozen(features))


def transformer(kind: str) -> nn.Module:
    """A transformers model from a small configuration, built as its library builds it."""
    import transformers as t

    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    small = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    if kind == "gpt2":
        config: Any = t.GPT2Config(n_embd=16, n_layer=2, n_head=4, n_positions=16, **common)
    elif kind == "bert":
        config = t.BertConfig(**small, **common, max_position_embeddings=16, num_labels=3)
    else:
        kinds = {"llama": t.LlamaConfig, "qwen3": t.Qwen3Config, "mistral": t.MistralConfig}
        extra = {"head_dim": 8} if kind == "qwen3" else {}
        config = kinds[kind](**small, **common, num_key_value_heads=2, **extra)
    auto = t.AutoModelForSequenceClassification if kind == "bert" else t.AutoModelForCausalLM
    return auto.from_config(config, attn_implementation="sdpa")


def documents() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH))
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[::2, LENGTH - 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "label": torch.randint(0, 3, (BATCH,))}


def features() -> dict[str, Tensor]:
    return {"features": torch.randn(BATCH, 6), "target": torch.randn(BATCH, 3)}


SUBJECTS: dict[str, Subject] = {
    "decoder": Subject(partial(decoder, VOCAB, 32, 2, 4, 2, seq_len=LENGTH), tokens, next_token),
    "tied": Subject(
        partial(decoder, VOCAB, 32, 2, 4, 4, seq_len=LENGTH, tied=True, dropout=0.2),
        tokens,
        next_token,
    ),
    "one-kv-head": Subject(
        partial(decoder, VOCAB, 32, 2, 4, 1, seq_len=LENGTH), tokens, next_token
    ),
    "convnet": Subject(partial(convnet, 8, 5), images, classification),
    "perceptron": Subject(Perceptron, features, mse),
    "vit": Subject(ViT, images, classification),
    "unreached": Subject(Unreached, features, mse),
    "llama": Subject(partial(transformer, "llama"), tokens, next_token),
    "qwen3": Subject(partial(transformer, "qwen3"), tokens, next_token),
    "mistral": Subject(partial(transformer, "mistral"), tokens, next_token),
    "gpt2": Subject(partial(transformer, "gpt2"), tokens, next_token),
    "bert": Subject(partial(transformer, "bert"), documents, classification),
}
NO_TP = {"convnet", "unreached"}
NO_STACK = {"perceptron", "vit"}  # nothing to cut along a sequence; attention flat in the block
ALL = ["dp2", "fsdp2", "fsdp2+zero1", "fsdp2+zero2", "dp2.fsdp2", "dp2.tp2", "fsdp2.tp2"]
WIDE = [
    "dp2.fsdp2+zero1",
    "dp2.tp2+sequence",
    "fsdp2+zero2.tp2+sequence",
    "fsdp4",
    "tp4+sequence",
    "fsdp2+offload",
    "vp2",
    "dp2.vp2",
]
GRID = [(name, layout) for name in SUBJECTS for layout in ("tp2", "tp2+sequence")]
GRID += in_turn(SUBJECTS, ALL, 3)
GRID = [(name, layout) for name, layout in GRID if not (name in NO_TP and "tp" in layout)]
GRID = [(name, layout) for name, layout in GRID if not (name in NO_STACK and "sequence" in layout)]
GRID += [("decoder", layout) for layout in WIDE]
GRID += [
    ("one-kv-head", "tp4"),
    ("gpt2", "tp4"),
    ("gpt2", "vp2"),
    ("llama", "fsdp2.vp2"),
    ("qwen3", "vp4"),
    ("llama", "tp4+sequence"),
    ("qwen3", "tp4"),
]


def run(pool: Any, subject: Subject, layout: str) -> LayoutResult:
    world = weft.Layout.parse(layout).world
    result = pool.run(check_layout, subject.case(), layout, reference(subject, STEPS), world=world)[
        0
    ]
    assert isinstance(result, LayoutResult)
    return result


@pytest.mark.grid
@pytest.mark.parametrize(("name", "layout"), GRID)
def test_layout_equals_one_device(pool: Any, name: str, layout: str) -> None:
    result = run(pool, replace(SUBJECTS[name], clip=0.5), layout)
    assert result.passed, result
    assert result.comms_seen, "a layout of several ranks that exchanges nothing"


@pytest.mark.grid(4, ci=4)
@pytest.mark.parametrize("recompute", ["selective", "full", 2])
@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "tp2+sequence", "fsdp2.tp2"])
def test_recomputed_layout_equals_one_device(pool: Any, recompute: str | int, layout: str) -> None:
    subject = replace(SUBJECTS["tied"], plan=(("accumulate", 2), ("recompute", recompute)))
    result = run(pool, subject, layout)
    assert result.passed, result


def test_a_model_whose_features_tp_does_not_divide_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="finds no attention"):
        laid(SUBJECTS["convnet"], seeded(SUBJECTS["convnet"].build), "tp7")


def test_sequence_is_refused_where_a_block_counts_positions_itself() -> None:
    with pytest.raises(UnsupportedModel, match="part of its block's own forward"):
        laid(SUBJECTS["vit"], seeded(ViT), "tp2+sequence")


def test_float64_is_what_is_compared() -> None:
    found = reference(SUBJECTS["decoder"], STEPS)
    assert all(
        value.dtype == torch.float64
        for name, value in found.final.items()
        if not name.endswith("/step")
    )
