"""Parts of a model with axes of their own equal one device, with the predicted collectives."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.cases import BATCH, LENGTH, VOCAB, Fused, FusedBlock, Subject, laid, reference, seeded
from weft.nn.losses import mse
from weft.verification.compare import LayoutResult, check_layout


class Tower(nn.Module):
    """Patches of an image through blocks: [b, patches, features] -> [b, patches, dim]."""

    def __init__(self, dim: int = 16):
        super().__init__()
        self.patches = nn.Linear(10, dim)
        self.blocks = nn.ModuleList(FusedBlock(dim, 4, 0.0) for _ in range(2))
        self.norm = nn.LayerNorm(dim)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class TextTower(nn.Module):
    """Token ids through blocks: [b, s] -> [b, s, dim]."""

    def __init__(self, dim: int = 16):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(FusedBlock(dim, 4, 0.0) for _ in range(2))

    def forward(self, input_ids: Tensor, image: Tensor) -> Tensor:
        x = self.embedding(input_ids) + image
        for block in self.blocks:
            x = block(x)
        return x


class TwoTowers(nn.Module):
    """An image and a text, and a head on both: -> [b, 3]."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.vision, self.text = Tower(), TextTower()
        self.head = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        if frozen:
            self.vision.requires_grad_(False)

    def forward(self, image: Tensor, input_ids: Tensor) -> Tensor:
        seen = self.vision(image).mean(1, keepdim=True)
        return self.head(self.text(input_ids, seen).mean(1)) * self.scale


def pairs() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH))
    ids[::2, 0] = VOCAB - 1
    return {
        "image": torch.randn(BATCH, 4, 10),
        "input_ids": ids,
        "target": torch.randn(BATCH, 3),
    }


def towers(frozen: bool = False, **parts: Any) -> Subject:
    lines = tuple(parts.items())
    arguments = (("accumulate", 2), *((("parts", dict(lines)),) if lines else ()))
    return Subject(partial(TwoTowers, frozen), pairs, mse, plan=arguments, clip=0.5)


def run(pool: Any, subject: Subject, layout: str) -> LayoutResult:
    bare = replace(subject, plan=(("accumulate", 2),))
    world = weft.Layout.parse(layout).world
    expected = reference(bare, 2)
    result = pool.run(check_layout, subject.case(), layout, expected, world=world)[0]
    assert isinstance(result, LayoutResult)
    return result


VISION = {"vision": "fsdp"}
CASES = [
    ("fsdp2.tp2", {"vision": "fsdp"}),
    ("fsdp2.tp2", {"vision": "fsdp", "*": "tp"}),
    ("fsdp2.tp2", {"head": "tp", "text.embedding": "whole"}),
    ("fsdp2", {"head": "whole"}),
    ("fsdp2.tp2", {"text.embedding": "fsdp+tp"}),
    ("fsdp2.tp2", {"vision": "fsdp+tp", "text.embedding": "fsdp+tp", "text": "fsdp.tp"}),
    ("dp2.fsdp2.tp2", {"vision": "fsdp+tp", "head": "tp"}),
]


@pytest.mark.parametrize(("layout", "parts"), CASES)
def test_parts_equal_one_device(pool: Any, layout: str, parts: dict[str, str]) -> None:
    result = run(pool, towers(**parts), layout)
    assert result.passed, result
