"""Nets that do what single families of transformers do, in few lines."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases import VOCAB, FusedBlock, Subject, tokens
from weft.nn.losses import next_token

DIM, HEADS, EXPERTS = 16, 4, 3


class NormedEmbedding(nn.Embedding):
    """A table whose rows leave through a norm, as in Inkling."""

    def __init__(self) -> None:
        super().__init__(VOCAB, DIM)
        self.scale = nn.LayerNorm(DIM)

    def forward(self, ids: Tensor) -> Tensor:
        return self.scale(super().forward(ids))


class ScaledHead(nn.Linear):
    """Each token has a scale of its own, as in Dory."""

    def __init__(self) -> None:
        super().__init__(DIM, VOCAB, bias=False)
        self.each = nn.Parameter(torch.rand(VOCAB) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.each


class Stack(nn.Module):
    """Token ids [b, s] -> logits [b, s, vocab] by blocks between an embedding and a head."""

    def __init__(self, embedding: type[nn.Module] | None = None, head: type | None = None):
        super().__init__()
        self.embedding = embedding() if embedding else nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(FusedBlock(DIM, HEADS, 0.0) for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = head() if head else nn.Linear(DIM, VOCAB, bias=False)

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.norm(self.through(self.embedding(input_ids))))


class LogitBias(Stack):
    """A bias that is no parameter is added to the logits, as in BART."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.linspace(-1, 1, VOCAB))

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) + self.bias


class LooksAtTokens(Stack):
    """Where a token stands decides what is computed, as in GPT-2's warning about padding."""

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = super().forward(input_ids)
        return logits * 2 if VOCAB in input_ids[:, [-1, 0]] else logits


class Cycles(Stack):
    """The blocks run several times, at first without gradients, as in HRM."""

    def through(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for cycle in range(4):
            with torch.set_grad_enabled(torch.is_grad_enabled() and cycle > 1):
                state = super().through(state + x)
        return state


class AllTokens(nn.Module):
    """Experts that take all tokens, one expert after the other: [experts * tokens, dim]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, DIM, DIM) / DIM)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.view(EXPERTS, -1, DIM), self.weight).view(-1, DIM)


class ByExpert(nn.Module):
    """A linear on tokens that are sorted by their experts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class ExpertsBlock(nn.Module):
    """Scores of a router weigh what all experts make, as in Llama 4."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, EXPERTS), AllTokens()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, DIM)
        scores = self.router(flat).softmax(-1).mT.reshape(-1, 1)
        made = self.experts(flat.repeat(EXPERTS, 1) * scores)
        return x + made.view(EXPERTS, *x.shape).sum(0)


class SortedBlock(nn.Module):
    """Tokens are sorted by their experts, and put back, as in JetMoE."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.inside = nn.Linear(DIM, EXPERTS), ByExpert()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, DIM)
        weight, expert = self.router(flat).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        made = torch.zeros_like(flat).index_add(0, order, self.inside(flat[order]))
        return x + F.gelu(made * weight[:, None]).view_as(x)


class WithExperts(Stack):
    """Experts of this kind after each attention."""

    def __init__(self, kind: type[nn.Module]):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(FusedBlock(DIM, HEADS, 0.0), kind()) for _ in range(2)
        )


class GivesFeatures(Stack):
    """Returns what its first blocks make too, as LLaVA its features of images: the second block
    takes one of them, no block the other, and the loss neither."""

    def forward(self, input_ids: Tensor) -> dict[str, Tensor | tuple[Tensor, Tensor]]:  # type: ignore[override]
        first = self.blocks[0](self.embedding(input_ids))
        beside = first.sin()
        logits = self.head(self.norm(self.blocks[1](first)))
        return {"features": (first, beside), "logits": logits}


def of_logits(output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return next_token(output["logits"], batch)


FAMILIES: dict[str, Subject] = {
    "normed-embedding": Subject(partial(Stack, NormedEmbedding), tokens, next_token),
    "scaled-head": Subject(partial(Stack, None, ScaledHead), tokens, next_token),
    "logit-bias": Subject(LogitBias, tokens, next_token),
    "gives-features": Subject(GivesFeatures, tokens, of_logits),
    "looks-at-tokens": Subject(LooksAtTokens, tokens, next_token),
    "cycles": Subject(Cycles, tokens, next_token),
    "all-tokens": Subject(partial(WithExperts, ExpertsBlock), tokens, next_token),
    "sorted-tokens": Subject(partial(WithExperts, SortedBlock), tokens, next_token),
}
