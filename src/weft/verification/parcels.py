"""What ranks exchange, as data of a plan: which samples each replica has, and which parts of
parameters are encoded together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from weft.core import (
    REPLICA_AXIS,
    STAGE_AXIS,
    Chunk,
    Plan,
    bucket_gradients,
    chunks_of,
    data_rank_indices,
    stored_segments,
)
from weft.parallel import DATA_AXES


@dataclass(frozen=True)
class WeightPart:
    """A part of a parameter, of this shape. `chunks`: where its elements lie in it, and in the
    whole."""

    name: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Parcel:
    """Parts that one rank of a replica encodes together."""

    parts: tuple[WeightPart, ...]

    @property
    def name(self) -> str:
        """By which it is told from others: that of its first part."""
        return self.parts[0].name

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [part.shape for part in self.parts]

    @property
    def size(self) -> int:
        """Elements of all parts."""
        return sum(map(prod, self.shapes))

    def taken(self, whole: Mapping[str, Tensor]) -> Tensor:
        """The parts one after the other, [n]; zeros of a tensor that is not there."""
        found = []
        for part in self.parts:
            local = torch.zeros(part.shape, dtype=torch.float64)
            for here, there in part.chunks if part.name in whole else ():
                local[here] = whole[part.name][there]
            found.append(local.flatten())
        return torch.cat(found)

    def put(self, flat: Tensor, whole: Mapping[str, Tensor]) -> None:
        """Write parts [n] into those whole tensors that are there."""
        for part, values in zip(self.parts, flat.split(list(map(prod, self.shapes))), strict=True):
            for here, there in part.chunks if part.name in whole else ():
                whole[part.name][there] = values.view(part.shape)[here]


def parcel_of(plan: Plan, rank: int, names: Sequence[str]) -> Parcel:
    """What a rank holds of these parameters. `plan`: of all ranks that its layout counts."""
    table, shapes = plan.params(), {w.name: w.shape for w in plan.weights}
    parts = []
    for name in names:
        segments = stored_segments(plan, shapes[name], table[name], rank)
        shape = tuple(sum(length for *_, length in dim) for dim in segments)
        parts.append(WeightPart(name, shape, chunks_of(segments)))
    return Parcel(tuple(parts))


def bucket_parcels(plan: Plan) -> list[Parcel]:
    """What the ranks of the first replica sum over replicas, each bucket of each."""
    found = []
    for rank in plan.layout.replicas()[0]:
        for bucket in bucket_gradients(plan.of(rank)):
            parcel = parcel_of(plan, rank, bucket.names)
            if REPLICA_AXIS in bucket.axes and parcel.size:
                found.append(parcel)
    return found


@dataclass(frozen=True)
class ScatteredUnit:
    """Parameters whose gradients FSDP2 reduces together, for each of its `ranks` the rows of dim 0
    that it holds. `often`: after every microbatch."""

    shapes: dict[str, tuple[int, ...]]
    ranks: int
    often: bool

    @property
    def name(self) -> str:
        """By which it is told from others: that of its first parameter."""
        return next(iter(self.shapes))

    def rows(self, whole: Mapping[str, Tensor]) -> Tensor:
        """[ranks, n]: all ranks have as many elements, with zeros after the last rows."""
        found = []
        for name, shape in self.shapes.items():
            short = -shape[0] % self.ranks
            padded = torch.zeros((shape[0] + short, *shape[1:]), dtype=torch.float64)
            if name in whole:
                padded[: shape[0]] = whole[name]
            found.append(padded.view(self.ranks, -1))
        return torch.cat(found, 1)

    def put(self, rows: Tensor, whole: Mapping[str, Tensor]) -> None:
        """Add rows to those whole tensors that are there."""
        at = 0
        for name, shape in self.shapes.items():
            size = (shape[0] + -shape[0] % self.ranks) // self.ranks * prod(shape[1:])
            if name in whole:
                whole[name].add_(rows[:, at : at + size].reshape(-1, *shape[1:])[: shape[0]])
            at += size


def scattered_units(plan: Plan) -> list[ScatteredUnit]:
    """The units whose gradients FSDP2 reduces, those of each stage. What other axes cut of them is
    left whole: codecs that meet it look at each element alone."""
    trained = {w.name: w.shape for w in plan.weights if w.trainable}
    found = []
    for rank in plan.layout.group_ranks(0, STAGE_AXIS):
        for step in plan.of(rank).steps:
            shapes = {p.name: trained[p.name] for p in step.params if p.name in trained}
            if step.gather is not None and shapes:
                # a pipeline's stages share the root, which is reduced when all backwards are done
                often = step.gather.reduced == "microbatch" and bool(
                    step.module or plan.staging is None
                )
                found.append(ScatteredUnit(shapes, plan.layout.size(step.gather.axis), often))
    return found


def samples_of(plan: Plan, *axes: str) -> list[list[int]]:
    """The samples that the ranks at each position on these axes take of a global batch, microbatch
    after microbatch; those of a microbatch in the order of the ranks."""
    layout = plan.layout
    found: list[list[int]] = []
    for position in range(layout.size(*axes)):
        ranks = [r for r in range(layout.world) if layout.index(r, *axes) == position]
        others = [name for name in DATA_AXES if name not in axes]
        # one rank of each data rank, in the order of what the others divide
        first = {layout.index(r, *others): layout.index(r, *DATA_AXES) for r in reversed(ranks)}
        parts = [
            data_rank_indices(plan.batch, plan.accumulate, first[other], plan.data_size)
            for other in sorted(first)
        ]
        found.append([i for micro in _by_microbatch(parts, plan.accumulate) for i in micro])
    return found


def _by_microbatch(parts: Sequence[Sequence[int]], accumulate: int) -> Iterator[list[int]]:
    size = len(parts[0]) // accumulate
    for m in range(accumulate):
        yield [i for part in parts for i in part[m * size : (m + 1) * size]]
