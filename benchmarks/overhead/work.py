"""The work that both sides do: one model, one text, one optimizer.

Of weft it imports the file of the decoder alone, with the routing of experts that this names: the
bare script of the start-up measurement must not pay for more.
"""

from __future__ import annotations

import importlib
import sysconfig
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

LR = 1e-3
adamw = partial(torch.optim.AdamW, lr=LR)

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]


def decoder_file() -> ModuleType:
    """The module of weft's decoder."""
    return importlib.import_module("weft.nn.models.decoder")


def build(
    dim: int, layers: int, heads: int, seq_len: int, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """weft's plain decoder over bytes; the same weights at every call."""
    torch.manual_seed(0)
    return (
        decoder_file()
        .decoder(vocab=256, dim=dim, layers=layers, heads=heads, seq_len=seq_len)
        .to(dtype)
    )


def llama(seq_len: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """transformers' Llama of 6 layers of width 320; the same weights at every call."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=320,
        intermediate_size=864,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=seq_len,
        use_cache=False,
    )
    torch.manual_seed(0)
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa"
    )
    return made.to(dtype)


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The repeated blocks, of either model."""
    return model.model.layers if hasattr(model, "model") else model.blocks


def compile_blocks(model: nn.Module) -> None:
    """Each block's forward by torch.compile, in place."""
    for block in blocks_of(model):
        block.compile(recompile_limit=64)


class Text:
    """Windows of one source file of the standard library: {"input_ids", "labels"}, int64 [seq_len]
    each."""

    def __init__(self, seq_len: int, split: str = "train"):
        source = Path(sysconfig.get_path("stdlib"), "_pydecimal.py").read_bytes()
        self.tokens = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
        self.seq_len = seq_len

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.tokens[index * self.seq_len : (index + 1) * self.seq_len + 1]
        return {"input_ids": window[:-1], "labels": window[1:]}


def batch_of(text: Text, batch: int, step: int) -> dict[str, Tensor]:
    """The global batch of this step: {"input_ids", "labels"}, int64 [batch, seq_len] each."""
    samples = [text[(step * batch + i) % len(text)] for i in range(batch)]
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def rows_of(batch: dict[str, Tensor], rank: int, world: int) -> dict[str, Tensor]:
    """A data rank's slice of a global batch."""
    return {key: value.chunk(world)[rank] for key, value in batch.items()}
