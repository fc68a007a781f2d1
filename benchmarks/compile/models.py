"""The models that are compiled: small, each with grouped keys where its family has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weft.models import decoder

VOCAB, WIDTH, HIDDEN, LAYERS, HEADS, KEYS, LENGTH = 96, 32, 48, 3, 4, 2, 16
BATCH = 8


def weft_decoder(dropout: float) -> nn.Module:
    return decoder(VOCAB, WIDTH, LAYERS, HEADS, KEYS, HIDDEN, LENGTH, dropout=dropout)


def gpt2(dropout: float) -> nn.Module:
    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH}
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return transformer("GPT2Config", **sizes, **drops)


def grouped(config: str, dropout: float, **options: Any) -> nn.Module:
    """A family of transformers with Llama's names of sizes; its one dropout is in attention."""
    return transformer(
        config,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEYS,
        attention_dropout=dropout,
        **options,
    )


def llama(dropout: float) -> nn.Module:
    return grouped("LlamaConfig", dropout)


def qwen3(dropout: float) -> nn.Module:
    return grouped("Qwen3Config", dropout, head_dim=WIDTH // HEADS)


def mixtral(dropout: float) -> nn.Module:
    return grouped("MixtralConfig", dropout, num_local_experts=4, num_experts_per_tok=2)


def transformer(config: str, **options: Any) -> nn.Module:
    import transformers

    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    made = getattr(transformers, config)(vocab_size=VOCAB, **tokens, **options)
    made.use_cache = False
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        made, attn_implementation="sdpa"
    )
    return model


MODELS: dict[str, Callable[[float], nn.Module]] = {
    "decoder": weft_decoder,
    "llama": llama,
    "qwen3": qwen3,
    "gpt2": gpt2,
    "mixtral": mixtral,
}


def batch_of(step: int) -> dict[str, Tensor]:
    """The global batch of this step: {"input_ids", "labels"}, int64 [BATCH, LENGTH] each."""
    draws = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=draws)
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
