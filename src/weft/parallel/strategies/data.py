"""Data parallel over `dp`: every replica holds all weights; gradients are summed over the replicas.

Buckets are overlapped with backward, and reduced on the last accumulation step only (Li et al.
2020).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.core import COPY, SUM, AxisTraits, Divides, Param, Step

from ._request import StepsRequest

AXIS = "dp"
TRAITS = AxisTraits(
    frozenset({Divides.SAMPLES}), order=1, spreads_experts=True, shrinks_freely=True
)
OPTIONS: Mapping[str, str] = {}


def steps(request: StepsRequest) -> Iterator[Step]:
    """One Step on the whole model: each gradient is a partial sum over `dp`."""
    alike = request.roles.alike(request.weights, request.layout, AXIS)
    params = (Param(w.name, AXIS, COPY, COPY, SUM) for w in alike)
    yield Step("", "data", params=tuple(params))
