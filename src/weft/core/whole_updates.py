"""Which rank updates a parameter whose optimizer needs it whole, where ranks hold parts of it.

Muon and Adafactor look at a whole matrix. The ranks that hold its parts send these, with their
gradients, to one of them, its owner, which alone keeps its optimizer state, updates it, and sends
each rank its part of the new weights: one all-to-all there and one back, for all parameters that
the same axes cut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from .plan import Plan
from .shards import Segment, cut_segments, fsdp_rows, take_segments
from .step import COPY, Param
from .sync import bucket_owners


@dataclass(frozen=True)
class WholeUpdate:
    """Parameters of one dtype that the same axes cut. `owners`: parameter -> the position on these
    axes of the rank that updates it."""

    axes: tuple[str, ...]
    dtype: torch.dtype
    owners: Mapping[str, int]


def whole_updates(plan: Plan, names: Collection[str]) -> list[WholeUpdate]:
    """The exchanges of a rank's part of a plan, for these of its parameters. Those that no axis
    cuts need none."""
    table = plan.params()
    together: dict[tuple[tuple[str, ...], torch.dtype], list[tuple[str, int]]] = {}
    for weight in plan.weights:
        cut = [axis for axis, p in table[weight.name].items() if p.stored != COPY]
        axes = plan.layout.active_axes(*cut) if cut else ()
        if weight.name in names and axes:
            one = weight.name, prod(weight.shape)
            together.setdefault((axes, weight.dtype), []).append(one)
    return [
        WholeUpdate(
            axes,
            dtype,
            dict(
                zip(
                    (name for name, _ in members),
                    bucket_owners([size for _, size in members], plan.layout.size(*axes)),
                    strict=True,
                )
            ),
        )
        for (axes, dtype), members in together.items()
    ]


def stored_segments(
    plan: Plan, shape: tuple[int, ...], placed: Mapping[str, Param], rank: int
) -> list[list[Segment]]:
    """Per dim of a rank's part of a parameter: where its rows lie in the global tensor.

    Args:
        plan: the plan, whose layout has the rank.
        shape: of the whole parameter.
        placed: axis -> where the parameter lies, of `Plan.params`.
        rank: whose part.
    """
    layout = plan.layout
    dims: list[list[Segment]] = [cut_segments([(0, n)]) for n in shape]
    for p in placed.values():
        if p.cut is not None and p.stored != COPY:
            index, size = layout.index(rank, p.axis), layout.size(p.axis)
            dims[p.cut.dim] = cut_segments(list(p.cut.intervals(index, size)))
    for p in placed.values():
        if p.stored != p.compute:
            rows = sum(length for _, _, length in dims[0])
            index, size = layout.index(rank, p.axis), layout.size(p.axis)
            dims[0] = take_segments(dims[0], *fsdp_rows(rows, size, index))
    return dims


def cuts_blocks(plan: Plan, shape: tuple[int, ...], placed: Iterable[Param], block: int) -> bool:
    """Whether some rank's part of a parameter begins inside a block. One dim alone has no blocks.

    Args:
        plan: the plan, whose layout has the ranks.
        shape: of the whole parameter.
        placed: where it lies on each axis.
        block: neighbours in the last dim that make a block.
    """
    last = len(shape) - 1
    for p in placed if last else ():
        if p.cut is None or p.stored == COPY or p.cut.dim % len(shape) != last:
            continue
        size = plan.layout.size(p.axis)
        for index in range(size):
            segments = cut_segments(list(p.cut.intervals(index, size)))
            if any(here % block or there % block for here, there, _ in segments):
                return True
    return False


def block_segments(dims: list[list[Segment]], block: int) -> list[list[Segment]]:
    """The segments of a tensor that has one entry for each block of the last dim."""
    blocks = [(here // block, there // block, -(-n // block)) for here, there, n in dims[-1]]
    return [*dims[:-1], blocks]


def stored_numel(dims: list[list[Segment]]) -> int:
    """Elements of a part that these segments describe."""
    return prod(sum(length for _, _, length in segments) for segments in dims)
