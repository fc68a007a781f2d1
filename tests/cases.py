"""What tests of verification share: tiny models with their data, and the Case that each makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.core.data_order import data_rank_indices
from weft.nn.losses import classification, cross_entropy, next_token
from weft.nn.models import convnet, decoder
from weft.train import in_dtype
from weft.verification.case import Batch, Case, to_float64
from weft.verification.reference import Reference, run_reference

A, B = TypeVar("A"), TypeVar("B")
BATCH, LENGTH, VOCAB = 8, 12, 67  # an odd vocabulary: its shards differ


class FusedAttention(nn.Module):
    """Causal attention with biases, one linear for queries, keys and values, and norms of queries
    and keys per head."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm, self.k_norm = nn.RMSNorm(dim // heads), nn.RMSNorm(dim // heads)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (part.view(b, s, -1, self.head_dim) for part in self.qkv(x).chunk(3, -1))
        q, k, v = (part.transpose(1, 2) for part in (self.q_norm(q), self.k_norm(k), v))
        return self.proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(b, s, -1)
        )


class FusedBlock(nn.Module):
    """Attention and a feed-forward of two linears, each after a layer norm and around a
    residual."""

    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = FusedAttention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Fused(nn.Module):
    """A decoder as GPT-2 wrote it, biases everywhere: token ids [b, s] -> logits [b, s, vocab]."""

    def __init__(self, vocab: int = VOCAB, dim: int = 16, heads: int = 4, dropout: float = 0.0):
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocab, dim), nn.Embedding(LENGTH, dim)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(FusedBlock(dim, heads, dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(p, std=0.1)  # a bias of zero hides how often it is added

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.position(torch.arange(input_ids.shape[1]))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tokens(vocab: int = VOCAB) -> Batch:
    """Labels that count unevenly: no two neighbouring rows, so no two ranks or microbatches, hold
    equally many."""
    ids, labels = torch.randint(0, vocab, (BATCH, LENGTH)), torch.randint(0, vocab, (BATCH, LENGTH))
    ids[::2, 0], labels[::2, 0] = (
        vocab - 1,
        vocab - 1,
    )  # the last word, where an uneven cut goes wrong
    for row in range(BATCH):
        labels[row, LENGTH - row % 5 :] = -100
    return {"input_ids": ids, "labels": labels}


def images() -> Batch:
    """Five classes of one channel, 8 x 8."""
    return {"image": torch.randn(BATCH, 1, 8, 8), "label": torch.randint(0, 5, (BATCH,))}


def whole_next_token(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """`next_token` that is not marked as taking sharded logits: the head's output is gathered for
    it."""
    return cross_entropy(output, batch["labels"])


@dataclass(frozen=True)
class Subject:
    """A model with its data; `plan` holds further arguments of weft.plan."""

    build: Callable[[], nn.Module]
    data: Callable[[], Batch] = tokens
    loss: Any = next_token
    plan: tuple[tuple[str, Any], ...] = (("accumulate", 2),)
    clip: float | None = None

    def case(self) -> Case:
        """Its Case: two optimizer steps of it are the same on every layout."""
        return Case(
            build=partial(seeded, self.build),
            plan=partial(laid, self),
            batch=partial(batch_of, self),
            loss=self.loss,
            optimizer=partial(torch.optim.AdamW, lr=1e-2),
            clip=self.clip,
        )


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return in_dtype(build(), torch.float64)


def laid(subject: Subject, model: nn.Module, layout: str) -> weft.Plan:
    arguments = dict(subject.plan)
    if layout == "dp1":
        for name in ("recompute", "fsdp_prefetch", "offload_activations", "parts", "fsdp_units"):
            arguments.pop(name, None)
    sample = {key: value[:2] for key, value in to_float64(global_batch(subject, 0)).items()}
    return weft.plan(
        model, layout, batch=BATCH, loss=subject.loss, precision="fp64", sample=sample, **arguments
    )


def global_batch(subject: Subject, step: int) -> Batch:
    torch.manual_seed(100 + step)
    return subject.data()


def batch_of(subject: Subject, step: int, data_rank: int, data_size: int) -> Batch:
    index = torch.tensor(
        data_rank_indices(BATCH, int(dict(subject.plan).get("accumulate", 1)), data_rank, data_size)
    )
    return {key: value[index] for key, value in global_batch(subject, step).items()}


def in_turn(first: Iterable[A], second: Sequence[B], each: int) -> list[tuple[A, B]]:
    """Every one of the first with so many of the second, and the next with those that follow: all
    pairs take long."""
    turns = cycle(second)
    return [(one, next(turns)) for one in first for _ in range(each)]


@cache
def reference(subject: Subject, steps: int = 2) -> Reference:
    """The one-device run, once for all layouts."""
    return run_reference(subject.case(), steps)


SUBJECTS: dict[str, Subject] = {
    "decoder": Subject(partial(decoder, VOCAB, 32, 2, 4, 2, seq_len=LENGTH)),
    "even": Subject(
        partial(decoder, 64, 32, 2, 4, 4, seq_len=LENGTH), partial(tokens, 64), whole_next_token
    ),
    "tied": Subject(partial(decoder, VOCAB, 32, 2, 4, 4, seq_len=LENGTH, tied=True)),
    "dropout": Subject(partial(Fused, dropout=0.2)),
    "recomputed": Subject(
        partial(Fused, dropout=0.2), plan=(("accumulate", 2), ("recompute", "full"))
    ),
    "fused": Subject(Fused),
    "clipped": Subject(Fused, clip=0.5),
    "convnet": Subject(partial(convnet, 8, 5), images, classification),
}
