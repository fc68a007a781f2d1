"""Batch norms that get some of the samples at a time are refused where ranks divide these."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.core.errors import Refusal


class InParts(nn.Module):
    """Normalizes parts: so many, or of so many samples."""

    def __init__(self, parts: int = 0, samples: int = 0):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.parts, self.samples = parts, samples

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        parts = x.chunk(self.parts) if self.parts else x.split(self.samples)
        return self.last(torch.cat([self.norm(part) for part in parts]))


class TwoViews(InParts):
    """Normalizes all samples twice, as siamese nets do."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)) + self.norm(self.first(x.flip(1))))


class OfPositions(InParts):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(torch.stack([x, x.flip(1)], 1)).flatten(0, 1)
        return self.last(self.norm(x).unflatten(0, (-1, 2)).mean(1))


def laid(build: Callable[[], nn.Module], layout: str, accumulate: int = 1) -> weft.Plan:
    sample = {"x": torch.randn(2, 6), "target": torch.randn(2, 4)}
    return weft.plan(
        build(), layout, batch=8, accumulate=accumulate, loss=weft.losses.mse, sample=sample
    )


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "dp2.fsdp2"])
@pytest.mark.parametrize(("kind", "fix"), [("samples", "Set it to 2, "), ("parts", "Leave ")])
def test_parts_are_refused(layout: str, kind: str, fix: str) -> None:
    build = partial(InParts, **{kind: {"samples": 4, "parts": 2}[kind]})
    with pytest.raises(Refusal, match=f"norm normalizes the 8 .* in 2 parts, .* {fix}"):
        laid(build, layout)


def test_a_microbatch_of_one_part_is_not() -> None:
    assert laid(partial(InParts, samples=4), "dp2", accumulate=2).batchnorms == ("norm",)


def test_what_divides_no_samples_is_not() -> None:
    assert laid(partial(InParts, samples=4), "dp1").batchnorms == ()


@pytest.mark.parametrize("build", [TwoViews, OfPositions])
def test_all_samples_at_once_are_not(build: Callable[[], nn.Module]) -> None:
    assert laid(build, "dp2").batchnorms == ("norm",)
