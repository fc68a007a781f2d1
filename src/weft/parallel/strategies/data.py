"""Data parallel over `dp`: every replica holds all weights; gradients are summed over the replicas.

Buckets are overlapped with backward, and reduced on the last accumulation step only (Li et al.
2020).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from weft.core import COPY, SPREAD, SUM, Layout, Param, Step, Weight
from weft.nn import Roles

AXIS = "dp"
OPTIONS: Mapping[str, str] = SPREAD


def steps(
    model: nn.Module, weights: Sequence[Weight], roles: Roles, layout: Layout, sharded_logits: bool
) -> Iterator[Step]:
    """One Step on the whole model: each gradient is a partial sum over `dp`."""
    params = (Param(w.name, AXIS, COPY, COPY, SUM) for w in roles.alike(weights, layout, AXIS))
    yield Step("", "data", params=tuple(params))
