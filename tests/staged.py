"""Models deep enough for eight stages, each with its data: what tests of pipelines share."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.cases import BATCH, LENGTH, VOCAB, Fused, Subject, images, tokens
from weft.core.schedule import Action, Schedule
from weft.nn.losses import classification, mse, next_token
from weft.nn.models import convnet, decoder

DEPTH = 7


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
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 4,
    }
    auto: Any = t.AutoModelForCausalLM
    if kind == "gpt2":
        config: Any = t.GPT2Config(n_embd=16, n_layer=DEPTH, n_head=4, n_positions=16, **common)
    elif kind == "bert":
        config, auto = (
            t.BertConfig(**small, **common, max_position_embeddings=16),
            t.AutoModelForMaskedLM,
        )
    elif kind == "t5":
        config = t.T5Config(
            d_model=16,
            d_kv=4,
            d_ff=24,
            num_layers=4,
            num_decoder_layers=4,
            num_heads=4,
            dropout_rate=0.1,
            decoder_start_token_id=0,
            **common,
        )
        auto = t.AutoModelForSeq2SeqLM
    else:
        kinds = {"llama": t.LlamaConfig, "qwen3": t.Qwen3Config}
        extra = {"head_dim": 8} if kind == "qwen3" else {}
        config = kinds[kind](**small, **common, num_key_value_heads=2, **extra)
    config.use_cache = False  # traces call the model by themselves
    return auto.from_config(config, attn_implementation="eager" if kind == "t5" else "sdpa")


def sequential() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(6, 16)]
    for _ in range(DEPTH):
        layers += [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(16, 3))


class Plain(nn.Module):
    """A forward as people write it: two inputs, long and short skips, an integer that travels, glue
    between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.side = nn.Linear(6, 16), nn.Linear(6, 16)
        self.scale = nn.Parameter(torch.randn(16))
        for i in range(DEPTH):
            self.add_module(f"step{i}", nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
        self.mix, self.out = nn.Linear(32, 16), nn.Linear(16, 3)

    def forward(self, features: Tensor, weights: Tensor) -> dict[str, Tensor]:
        start = self.enter(features) * self.scale
        side = self.side(features + weights.mean(1, keepdim=True))
        chosen = side.argmax(1)  # integers, made on the first stage and used on the last
        x, early = start, None
        for i in range(DEPTH):
            x = x + 0.5 * getattr(self, f"step{i}")(x)
            if i == 1:
                early = x.relu()
            elif i == 4:
                x = self.mix(torch.cat([x, early], 1)) + start
        picked = x.gather(1, chosen[:, None])
        return {"output": self.out(x + side) + picked}


def two_inputs() -> dict[str, Tensor]:
    return {
        "features": torch.randn(BATCH, 6),
        "weights": torch.randn(BATCH, 4),
        "target": torch.randn(BATCH, 3),
    }


def plain_loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return mse(output["output"], batch)


def one_input() -> dict[str, Tensor]:
    return {"input": torch.randn(BATCH, 6), "target": torch.randn(BATCH, 3)}


def padded() -> dict[str, Tensor]:
    batch = tokens()
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    for row in range(BATCH):
        mask[row, LENGTH - row % 4 :] = 0
    return {**batch, "attention_mask": mask}


def translated() -> dict[str, Tensor]:
    batch = tokens()
    return {**batch, "decoder_input_ids": batch["input_ids"].flip(1)}


class Deep(Fused):
    """The fused decoder, deeper, with dropout in blocks, before them and after them."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        block = type(self.blocks[0])
        self.blocks = nn.ModuleList(block(16, 4, 0.2) for _ in range(DEPTH))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.position(torch.arange(input_ids.shape[1]))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(self.norm(x)))


PLAN = (("accumulate", 4),)
STAGED: dict[str, Subject] = {
    "decoder": Subject(
        partial(decoder, VOCAB, 32, DEPTH, 4, 2, seq_len=LENGTH), tokens, next_token, PLAN
    ),
    "tied": Subject(
        partial(decoder, VOCAB, 32, DEPTH, 4, 4, seq_len=LENGTH, tied=True),
        tokens,
        next_token,
        PLAN,
    ),
    "deep": Subject(Deep, tokens, next_token, PLAN),
    "convnet": Subject(partial(convnet, 8, 5), images, classification, PLAN),
    "sequential": Subject(sequential, one_input, mse, PLAN),
    "plain": Subject(Plain, two_inputs, plain_loss, PLAN),
    "llama": Subject(partial(transformer, "llama"), tokens, next_token, PLAN),
    "qwen3": Subject(partial(transformer, "qwen3"), padded, next_token, PLAN),
    "gpt2": Subject(partial(transformer, "gpt2"), tokens, next_token, PLAN),
    "bert": Subject(partial(transformer, "bert"), padded, next_token, PLAN),
    "t5": Subject(partial(transformer, "t5"), translated, next_token, PLAN),
}


def own_gpipe(ranks: int, microbatches: int, *, back: bool = False) -> Schedule:
    """As one's own schedule may be: GPipe, whose backwards may run the other way round."""
    turns = range(microbatches)
    order = [
        [
            *(Action("F", rank, m) for m in turns),
            *(Action("B", rank, m) for m in (turns[::-1] if back else turns)),
        ]
        for rank in range(ranks)
    ]
    return Schedule("own", tuple(range(ranks)), tuple(map(tuple, order)))


def broken(ranks: int, microbatches: int) -> Schedule:
    raise KeyError("tide")
