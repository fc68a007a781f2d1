"""Ulysses over `up`, beside `cp`: the sequence of a ring's rank is cut once more, and whole for a part of its heads.

Fang and Zhao 2024 (USP). Alone, `up4` is `cp4+ulysses`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from ..layout import SPREAD, Layout
from ..plans import Step, Weight, divided
from ..roles import Roles

AXIS = "up"
OPTIONS: Mapping[str, str] = SPREAD


def steps(
    model: nn.Module, weights: Sequence[Weight], roles: Roles, layout: Layout, sharded_logits: bool
) -> Iterator[Step]:
    """One Step on the whole model."""
    yield divided(AXIS, "ulysses", roles.alike(weights, layout, AXIS))
