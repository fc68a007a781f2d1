"""Ulysses over `up`, beside `cp`: the sequence of a ring's rank is cut once more, and whole for a
part of its heads.

Fang and Zhao 2024 (USP). Alone, `up4` is `cp4+ulysses`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from weft.core import SPREAD, Layout, Step, Weight, sequence_step
from weft.nn import Roles

AXIS = "up"
OPTIONS: Mapping[str, str] = SPREAD


def steps(
    model: nn.Module, weights: Sequence[Weight], roles: Roles, layout: Layout, sharded_logits: bool
) -> Iterator[Step]:
    """One Step on the whole model."""
    yield sequence_step(AXIS, "ulysses", roles.alike(weights, layout, AXIS))
