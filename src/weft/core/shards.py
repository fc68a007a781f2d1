"""LocalShard: one rank's part of one global tensor; and the arithmetic of chunks.

A dim of a local tensor is described by segments (local_start, global_start, length). Cutting a dim
gives segments, cutting it again keeps them exact, and the product over the dims gives the chunks:

    fused q,k,v of 3 x 4 rows, tensor-parallel rank 1 of 2      local rows  0 1 | 2 3 |  4  5
                                                               global rows  2 3 | 6 7 | 10 11
    cut_segments([(2, 4), (6, 8), (10, 12)])  ->  [(0, 2, 2), (2, 6, 2), (4, 10, 2)]
    take(that, 3, 6), its second FSDP half    ->  [(0, 7, 1), (1, 10, 2)]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import torch

Index = tuple[slice, ...]  # one slice per dim, start and stop given, step 1
Chunk = tuple[Index, Index]  # (where in the local tensor, where in the global tensor)
Segment = tuple[int, int, int]  # (local start, global start, length) along one dim
_MOST_VISITS = 16  # of each box in each dim: of a grid, as layouts make them, one


class _NoGrid(Exception):
    """Boxes that no layout makes: to look at them would take as long as their writer likes."""


@dataclass(frozen=True)
class LocalShard:
    """One rank's part of one global tensor. Raises ValueError if a chunk does not fit the tensors
    it joins."""

    name: str  # global name: "blocks.0.wq.weight", "optimizer/blocks.0.wq.weight/exp_avg"
    tensor: torch.Tensor  # a plain tensor, a view of the live storage: loading writes in place
    shape: tuple[int, ...]  # of the global tensor
    chunks: tuple[Chunk, ...]
    writer: bool  # of the ranks that hold the same chunks, this one writes

    def __post_init__(self) -> None:
        for local, position in self.chunks:
            inside = _check_inside(local, tuple(self.tensor.shape)) and _check_inside(
                position, self.shape
            )
            if not inside or index_shape(local) != index_shape(position):
                raise ValueError(
                    f"{self.name}: {index_text(local)} of a local {tuple(self.tensor.shape)} "
                    f"cannot be {index_text(position)} of a global {self.shape}"
                )


def whole_shard(name: str, tensor: torch.Tensor, writer: bool = True) -> LocalShard:
    """The shard of a tensor that this rank holds completely."""
    shape = tuple(tensor.shape)
    return LocalShard(
        name, tensor, shape, chunks_of([cut_segments([(0, size)]) for size in shape]), writer
    )


def fsdp_rows(size: int, world: int, rank: int) -> tuple[int, int]:
    """(start, stop) of the rows of dim 0 that torch's `Shard(0)` gives to this rank. The last ranks
    may get none."""
    rows = -(-size // world)
    return min(rank * rows, size), min((rank + 1) * rows, size)


def cut_segments(intervals: Iterable[tuple[int, int]]) -> list[Segment]:
    """Segments of a local dim that is the concatenation of these global intervals (start, stop)."""
    segments: list[Segment] = []
    local = 0
    for start, stop in intervals:
        if (
            segments and segments[-1][1] + segments[-1][2] == start
        ):  # continues the last one: fewer, larger chunks
            segments[-1] = (*segments[-1][:2], segments[-1][2] + stop - start)
        elif start < stop:
            segments.append((local, start, stop - start))
        local += stop - start
    return segments


def take_segments(segments: Iterable[Segment], start: int, stop: int) -> list[Segment]:
    """Segments of the rows start:stop, counted from 0, of a dim that is already sharded."""
    taken = []
    for local, position, length in segments:
        first, last = max(local, start), min(local + length, stop)
        if first < last:
            taken.append((first - start, position + first - local, last - first))
    return taken


def chunks_of(dims: Sequence[Sequence[Segment]]) -> tuple[Chunk, ...]:
    """The product of the dims' segments. No dims: the one chunk of a 0-dim tensor; an empty dim: no
    chunks."""
    return tuple(
        (
            tuple(slice(local, local + length) for local, _, length in segments),
            tuple(slice(start, start + length) for _, start, length in segments),
        )
        for segments in product(*dims)
    )


def index_shape(index: Index) -> tuple[int, ...]:
    """Shape of what an index selects."""
    return tuple(part.stop - part.start for part in index)


def index_overlap(one: Index, other: Index) -> Index | None:
    """The intersection of two indices of the same tensor, or None."""
    common = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True)
    )
    return None if any(part.start >= part.stop for part in common) else common


def shift_index(index: Index, origin: Index, target: Index) -> Index:
    """`index`, which is inside `origin`, moved by the distance from `origin` to `target`."""
    return tuple(
        slice(i.start - o.start + t.start, i.stop - o.start + t.start)
        for i, o, t in zip(index, origin, target, strict=True)
    )


def index_text(index: Index) -> str:
    """As in Python: `[0:4, 2:8]`."""
    return "[" + ", ".join(f"{part.start}:{part.stop}" for part in index) + "]"


def coverage_flaw(boxes: Iterable[Index], shape: tuple[int, ...]) -> str | None:
    """None if the boxes cover every element of a tensor of this shape exactly once; otherwise a
    text that says where they do not."""
    boxes = list(boxes)
    for box in boxes:
        if not _check_inside(box, shape):
            return f"{index_text(box)} lies outside of {shape}"
    boxes = [box for box in boxes if 0 not in index_shape(box)]
    try:
        found = _flaw(boxes, shape, [_MOST_VISITS * (len(boxes) + 100) * (len(shape) + 1)])
    except _NoGrid:
        return f"{len(boxes)} chunks of {shape} divide it as no layout does"
    if found is None:
        return None
    where, times = found
    return f"{index_text(where)} of {shape} is in {times or 'no'} chunk{'s' if times > 1 else ''}"


def assemble(
    pieces: Iterable[tuple[torch.Tensor, Sequence[Chunk]]],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The full tensor, on the CPU. Raises ValueError unless the chunks hold every element exactly
    once."""
    pieces = list(pieces)
    problem = coverage_flaw((position for _, parts in pieces for _, position in parts), shape)
    if problem:
        raise ValueError(problem)
    full = torch.empty(shape, dtype=dtype)
    for tensor, parts in pieces:
        for local, position in parts:
            full[position] = tensor.detach()[local].to(full.device)
    return full


def _check_inside(box: Index, shape: tuple[int, ...]) -> bool:
    return len(box) == len(shape) and all(
        0 <= part.start <= part.stop <= size for part, size in zip(box, shape)
    )


def _flaw(
    boxes: Sequence[Index], shape: tuple[int, ...], left: list[int]
) -> tuple[Index, int] | None:
    """Sweep along the first dim; between two edges the same boxes are open, and those must tile the
    other dims. `left`: how many boxes may still be looked at. Raises _NoGrid."""
    left[0] -= len(boxes)
    if left[0] < 0:
        raise _NoGrid
    if not shape:
        return None if len(boxes) == 1 else ((), len(boxes))
    opening, closing = defaultdict(list), defaultdict(list)
    for number, box in enumerate(boxes):
        opening[box[0].start].append(number)
        closing[box[0].stop].append(number)
    open_boxes: dict[int, Index] = {}
    for start, stop in pairwise(sorted({0, shape[0], *opening, *closing})):
        for number in closing[start]:
            del open_boxes[number]
        for number in opening[start]:
            open_boxes[number] = boxes[number][1:]
        found = _flaw(list(open_boxes.values()), shape[1:], left)
        if found is not None:
            return (slice(start, stop), *found[0]), found[1]
    return None
