"""Context parallel over `cp`: the sequence is cut through the whole model, and only attention knows
of it.

Every rank has the weights, runs on its part of each sample, and leaves partial sums as gradients.
How attention reaches the other parts is the method; see `engine/sequence.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.core import AxisTraits, Divides, LayoutError, Step, sequence_step
from weft.nn import attends_eagerly

from ._mixers import mixer_steps
from ._request import StepsRequest

AXIS = "cp"
TRAITS = AxisTraits(
    frozenset({Divides.POSITIONS}),
    order=4,
    spreads_experts=True,
    written_as={"ulysses": "ulysses"},
)
OPTIONS: Mapping[str, str] = {
    "ring": "keys and values travel around the ranks (the default)",
    "gather": "keys and values are gathered (the default where a model attends eagerly)",
    "ulysses": "the sequence is whole for a part of the heads, by all-to-all there and back",
}


def steps(request: StepsRequest) -> Iterator[Step]:
    """One Step on the whole model, and one on each module that needs whole sequences."""
    layout = request.layout
    usual = "gather" if attends_eagerly(request.model) else "ring"
    methods = tuple(option for option in layout.options_of(AXIS) if option != "ep") or (usual,)
    if len(methods) > 1:
        fix = "choose one; ulysses beside cp divides within each rank of the ring"
        raise LayoutError("layout", str(layout), f"{' and '.join(methods)} at once", fix)
    if methods[0] == "ulysses" and layout.active_axes("ulysses"):
        raise LayoutError(
            "layout",
            str(layout),
            "the axis ulysses does the same",
            "write one axis, or cp+ring or cp+gather",
        )
    yield from mixer_steps(request)
    yield sequence_step(AXIS, methods[0], request.roles.alike(request.weights, layout, AXIS))
