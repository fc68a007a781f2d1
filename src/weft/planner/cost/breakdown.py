"""Parts: what an estimate is the sum of, each with the formula that gave it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .layout_batch import Array


@dataclass(frozen=True)
class CostPart:
    """`value` of each choice, and the formula that gave it, with what its symbols stand for."""

    name: str
    value: Array
    formula: str
    symbols: Mapping[str, Array | float] = field(default_factory=dict)
