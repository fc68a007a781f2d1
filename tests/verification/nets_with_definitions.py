"""Nets that run what verify's reference has definitions of its own for: dropout, draws, losses,
experts."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases import BATCH, LENGTH, SUBJECTS, VOCAB, Subject, tokens
from weft.nn.losses import causal_lm, cross_entropy, mse, next_token
from weft.nn.models import decoder


class DroppedAttention(nn.Module):
    """Causal attention whose weights are dropped, over blocks; and noise."""

    def __init__(self, dim: int = 32, heads: int = 4):
        super().__init__()
        self.embedding, self.heads = nn.Embedding(VOCAB, dim), heads
        self.blocks = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(2))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            q, k, v = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for part in block(x).chunk(3, -1)
            )
            p = 0.3 if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
            x = x + y.transpose(1, 2).flatten(2)
        return self.head(x + 0.1 * torch.randn_like(x))


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 16), nn.AlphaDropout(0.3), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def of_squares() -> dict[str, Tensor]:
    return {"x": torch.randn(BATCH, 6), "target": torch.randn(BATCH, 3)}


def ids_alone() -> dict[str, Tensor]:
    return {"input_ids": tokens()["input_ids"]}


MIXTURE = partial(
    decoder, VOCAB, 32, 2, 4, seq_len=LENGTH, hidden=32, experts=4, balance=0.1, z=0.1
)


def smoothed(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A loss of a user's own, of which a part is weft's."""
    total, count = cross_entropy(output, batch["labels"])
    return total + 1e-2 * output.square().sum(), count


CASES = {
    "dropout": SUBJECTS["dropout"],
    "decoder": SUBJECTS["decoder"],
    "attention": Subject(DroppedAttention),
    "squares": Subject(Squares, of_squares, mse),
    "shifted": Subject(partial(decoder, VOCAB, 32, 2, 4, seq_len=LENGTH), ids_alone, next_token),
    "aligned": Subject(partial(decoder, VOCAB, 32, 2, 4, seq_len=LENGTH), tokens, causal_lm),
    "smoothed": Subject(partial(decoder, VOCAB, 32, 2, 4, seq_len=LENGTH), tokens, smoothed),
    "experts": Subject(partial(MIXTURE, bias=0.05)),
    "capacity": Subject(partial(MIXTURE, capacity=1.0, gate="sigmoid", shared=1)),
}
