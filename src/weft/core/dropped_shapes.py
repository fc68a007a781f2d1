"""Which dim counts samples in what a forward drops out, or draws random numbers after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Shapes = frozenset[tuple[int, ...]]


@dataclass(frozen=True)
class DroppedShapes:
    """Dim 0 counts samples, alone or with positions, unless this says otherwise.

    `by_sample` and `written` have -n in the place of a dim that counts n rows of each sample; a
    shape of `written` without such a dim is one that all samples share.
    """

    positions_first: bool = False  # whether some are [positions, samples, features]
    without_samples: Shapes = frozenset()  # those that all samples share, as positions alone
    unclear: Shapes = frozenset()  # those that all samples share, or that count some samples
    by_sample: Shapes = frozenset()  # of three dims, where some have positions first
    written: Shapes = frozenset()  # of random numbers whose shape the model writes out


def dims_of_samples(
    shapes: Shapes, shape: Sequence[int], samples: int
) -> frozenset[tuple[int, int] | None]:
    """The dims that count so many samples in a tensor of this shape, by each of `shapes` that it
    may have: (the dim, how many rows of a sample it counts), or None if all samples share it."""
    found = set[tuple[int, int] | None]()
    for known in shapes:
        if len(known) == len(shape) and all(
            n == (size if size >= 0 else -size * samples)
            for n, size in zip(shape, known, strict=True)
        ):
            rows = [(dim, -size) for dim, size in enumerate(known) if size < 0]
            found.add(rows[0] if rows else None)
    return frozenset(found)
