"""The work that both sides do: one model, one text, one optimizer.

Nothing here imports weft's package: the bare script of the start-up measurement must not pay for
it. The model file imports nothing of weft either, so it is loaded by its path.
"""

from __future__ import annotations

import importlib.util
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
    """The module weft.models.decoder, without importing weft."""
    package = importlib.util.find_spec("weft")
    assert package is not None and package.submodule_search_locations, (
        "install weft first: ./quickstart.sh"
    )
    path = Path(package.submodule_search_locations[0], "models", "decoder.py")
    spec = importlib.util.spec_from_file_location("decoder_file", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
