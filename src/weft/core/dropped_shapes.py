"""Which dim counts samples in what a forward drops out, or draws random numbers after."""

from __future__ import annotations

from dataclasses import dataclass

Shapes = frozenset[tuple[int, ...]]


@dataclass(frozen=True)
class DroppedShapes:
    """Dim 0 counts samples, alone or with positions, unless this says otherwise."""

    positions_first: bool = False  # whether some are [positions, samples, features]
    without_samples: Shapes = frozenset()  # those that all samples share, as positions alone
    unclear: Shapes = frozenset()  # those that all samples share, or that count some samples
