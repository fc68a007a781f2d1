"""Which dim of random numbers counts samples, where the model writes out their shape."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.core import DroppedShapes


@pytest.mark.parametrize(
    ("written", "shape", "samples", "dim", "unclear"),
    [
        ((-1, 8), (4, 8), 4, 0, False),
        ((8, -1), (8, 4), 4, 1, False),
        ((1, 8), (1, 8), 1, None, False),  # which all share
        # rows of each sample, as in torch.randn(b * t, d): other samples have other numbers
        ((-8, 16), (32, 16), 4, 0, True),
        ((-8, 16), (8, 16), 1, 0, True),
        ((5, -2), (5, 8), 4, None, True),
    ],
)
def test_dim_of_samples(
    written: tuple[int, ...], shape: tuple[int, ...], samples: int, dim: int | None, unclear: bool
) -> None:
    known = DroppedShapes(written=frozenset([written]))
    assert known.dim_of_written(shape, samples) == dim
    assert known.is_written_unclear(shape, samples) == unclear


class Noisy(nn.Module):
    """Noise of weights, which all samples share, and a mask of its elements, as in Rainbow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(8)
        x = self.layer(x) * noise
        low = x.floor().long()
        low[(low > 0) & (low == x)] -= 1
        return x + low


def test_a_mask_of_elements_hides_no_shape() -> None:
    """Two samples divide 8, so the shape alone does not say that they share it."""
    sample = {"x": torch.randn(2, 8)}
    plan = weft.plan(Noisy(), "dp2", batch=8, sample=sample)
    assert plan.dropped.written == {(8,)}
    assert not plan.dropped.is_written_unclear((8,), 2)
