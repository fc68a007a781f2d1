"""Which dim of random numbers counts samples, where the model writes out their shape."""

from __future__ import annotations

import pytest

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
