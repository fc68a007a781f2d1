"""Models and losses that compare samples with one another."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases import BATCH
from weft.losses import whole_batch

DIM = 8


class Tower(nn.Module):
    """[b, inputs] -> [b, DIM], of length one."""

    def __init__(self, inputs: int, dropout: float):
        super().__init__()
        self.first = nn.Linear(inputs, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16))
            for _ in range(2)
        )
        self.last = nn.Linear(16, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return F.normalize(self.last(x), dim=-1)


class TwoTowers(nn.Module):
    """As CLIP (Radford et al. 2021): an embedding of each side, and a learned temperature."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.image, self.text = Tower(12, dropout), Tower(6, dropout)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, pixels: Tensor, words: Tensor) -> dict[str, Tensor]:
        return {
            "image": self.image(pixels),
            "text": self.text(words),
            "scale": self.logit_scale.exp(),
        }


class TwoTowersWithLogits(TwoTowers):
    """Returns each image's logits of each text too, of the samples that it gets."""

    def forward(self, pixels: Tensor, words: Tensor) -> dict[str, Tensor]:
        found = super().forward(pixels, words)
        return {"logits": found["scale"] * found["image"] @ found["text"].T, **found}


class Embedder(nn.Module):
    """One tower, whose samples are compared with one another."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Tower(12, 0.1)

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        return {"image": self.body(pixels)}


class TwoViews(nn.Module):
    """As SimCLR (Chen et al. 2020): two views of each sample, a projection, batch norm."""

    def __init__(self, norm: bool = False):
        super().__init__()
        self.body = Tower(12, 0.0)
        self.norm = nn.BatchNorm1d(DIM) if norm else nn.Identity()
        self.head = nn.Linear(DIM, DIM, bias=False)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        views = torch.cat([pixels, pixels.flip(1)])
        found = F.normalize(self.head(self.norm(self.body(views))), dim=-1)
        return tuple(found.chunk(2))  # type: ignore[return-value]


def pairs() -> dict[str, Tensor]:
    return {
        "pixels": torch.randn(BATCH, 12),
        "words": torch.randn(BATCH, 6),
        "kind": torch.arange(BATCH) % 3,
        "counts": torch.rand(BATCH) > 0.2,
    }


def both_ways(output: Any, batch: Any) -> tuple[Tensor, Any]:
    """InfoNCE of images and texts (van den Oord et al. 2018), of this output's samples."""
    logits = output["scale"] * output["image"] @ output["text"].T
    own = torch.arange(len(logits))
    there = F.cross_entropy(logits, own, reduction="sum")
    return (there + F.cross_entropy(logits.T, own, reduction="sum")) / 2, len(logits)


@whole_batch
def reads_logits(output: Any, batch: Any) -> tuple[Tensor, Any]:
    """Of the logits that the model returns, which are not those of the whole batch."""
    logits = output["logits"]
    return F.cross_entropy(logits, torch.arange(len(logits)), reduction="sum"), len(logits)


@whole_batch
def clip(output: Any, batch: Any) -> tuple[Tensor, Any]:
    return both_ways(output, batch)


@whole_batch
def nt_xent(output: Any, batch: Any) -> tuple[Tensor, Any]:
    """Each view is to find the other one among all."""
    z = torch.cat(output)
    n = len(z)
    scores = (z @ z.T / 0.5).masked_fill(torch.eye(n, dtype=torch.bool), float("-inf"))
    return F.cross_entropy(scores, torch.arange(n).roll(n // 2), reduction="sum"), n


@whole_batch
def triplets(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """All triplets of the batch, by `kind`; samples that do not count are left out (Schroff et al.
    2015)."""
    away = torch.cdist(output["image"], output["image"]).clamp(min=1e-3)
    same = batch["kind"][:, None] == batch["kind"][None]
    counts = batch["counts"]
    every = (same & ~torch.eye(len(same), dtype=torch.bool))[:, :, None] & ~same[:, None, :]
    every = every & counts[:, None, None] & counts[None, :, None] & counts[None, None]
    hinge = (away[:, :, None] - away[:, None, :] + 0.3).clamp(min=0.0)
    return hinge[every].sum(), every.sum()
