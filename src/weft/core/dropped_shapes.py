"""Which dim counts samples in what a forward drops out, or draws random numbers after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Shapes = frozenset[tuple[int, ...]]


@dataclass(frozen=True)
class DroppedShapes:
    """Dim 0 counts samples, alone or with positions, unless this says otherwise.

    `by_sample`, `written` and `uneven` have -n for a dim that counts n rows of each sample; a
    shape of `written` without such a dim is one that all samples share. `uneven` has 0 in the place
    of a dim whose length the data say.
    """

    positions_first: bool = False  # whether some are [positions, samples, features]
    without_samples: Shapes = frozenset()  # those that all samples share, as positions alone
    unclear: Shapes = frozenset()  # those that all samples share, or that count some samples
    by_sample: Shapes = frozenset()  # of three dims, where some have positions first
    written: Shapes = frozenset()  # of random numbers whose shape the model writes out
    uneven: Shapes = frozenset()  # as of edges of graphs, or of sequences cut to the longest

    def dim_of_written(self, shape: Sequence[int], samples: int) -> int | None:
        """The dim that counts samples, or rows of them, in a shape that the model writes out; None
        if all of them share it."""
        known = dims_of_samples(self.written, shape, samples)
        if len(known) == 1:
            ((dim, rows),) = known
            # rows of a sample lie together in a first dim, as those of x.reshape(-1, features)
            return dim if rows == 1 or (rows > 1 and dim == 0) else None
        return 0 if shape and shape[0] and shape[0] == samples else None

    def is_written_unclear(self, shape: Sequence[int], samples: int) -> bool:
        """Whether nothing says if samples share a shape that the model writes out, or in which
        order it counts several rows of each."""
        known = dims_of_samples(self.written, shape, samples)
        if len(known) == 1:
            ((_, rows),) = known
            return rows > 1
        length = shape[0] if shape else 0
        several = bool(samples and length) and length % samples == 0
        return len(known) > 1 or (several and (length > samples or tuple(shape) == (1,)))

    def is_uneven(self, shape: Sequence[int], samples: int) -> bool:
        """Whether the data say how long a dim of this shape is."""
        rows = samples in shape[:1]  # each sample has one
        for known in self.uneven:
            if len(known) == len(shape) and not (rows and known[0] == 0):
                sizes = [size if size >= 0 else -size * samples for size in known]
                if all(size in (0, n) for n, size in zip(shape, sizes, strict=True)):
                    return True
        return False


def dims_of_samples(
    shapes: Shapes, shape: Sequence[int], samples: int
) -> frozenset[tuple[int, int]]:
    """The dims that count so many samples in a tensor of this shape, by each of `shapes` that it
    may have: (the dim, how many rows of a sample it counts), or (0, 0) if all samples
    share it."""
    found = set[tuple[int, int]]()
    for known in shapes:
        if len(known) == len(shape) and all(
            n == (size if size >= 0 else -size * samples)
            for n, size in zip(shape, known, strict=True)
        ):
            rows = [(dim, -size) for dim, size in enumerate(known) if size < 0]
            found.add(rows[0] if rows else (0, 0))
    return frozenset(found)
