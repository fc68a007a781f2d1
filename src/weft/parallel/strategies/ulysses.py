"""Ulysses beside `cp`: the sequence of a ring's rank is cut once more, and whole for a part of its
heads.

Fang and Zhao 2024 (USP). Alone, `ulysses4` is `cp4+ulysses`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.core import AxisTraits, Divides, Step, sequence_step

from ._mixers import mixer_steps
from ._request import StepsRequest

AXIS = "ulysses"
TRAITS = AxisTraits(
    frozenset({Divides.POSITIONS, Divides.ATTENTION_HEADS}),
    order=5,
    spreads_experts=True,
    within_node=True,
)
OPTIONS: Mapping[str, str] = {}


def steps(request: StepsRequest) -> Iterator[Step]:
    """One Step on the whole model; what needs whole sequences is named by `cp`, where it is."""
    if not request.layout.active_axes("cp"):
        yield from mixer_steps(request)
    alike = request.roles.alike(request.weights, request.layout, AXIS)
    yield sequence_step(AXIS, "ulysses", alike)
