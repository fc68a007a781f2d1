"""Which weights are copies of file tensors, whole or put together from several, so that a part of
the weight is read as parts of files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weft.core import Index, LocalShard, index_overlap, index_shape, shift_index

from .init_recording import InitRecording
from .recorded_ops import StorageView
from .weight_files import FileTensor

aten = torch.ops.aten


@dataclass(frozen=True)
class FilePiece:
    """A file's tensor that lies at `position` in a weight. `dims`: which dims of the weight are
    those of the file's tensor; along the others it is one element thick."""

    file: FileTensor
    position: Index
    dims: tuple[int, ...]

    def read(self, index: Index) -> Tensor:
        """The elements at `index` of the weight, which is inside of this piece."""
        start = tuple(slice(0, part.stop - part.start) for part in self.position)
        inside = shift_index(index, self.position, start)
        return self.file.read(tuple(inside[dim] for dim in self.dims)).view(index_shape(index))

    def inside(self, dim: int, start: int) -> FilePiece:
        """The same in a weight that begins `start` earlier along this dim."""
        moved = slice(self.position[dim].start + start, self.position[dim].stop + start)
        return replace(self, position=(*self.position[:dim], moved, *self.position[dim + 1 :]))

    def stacked(self, dim: int, place: int) -> FilePiece:
        """The same in a stack of weights along a new dim."""
        position = (*self.position[:dim], slice(place, place + 1), *self.position[dim:])
        return FilePiece(self.file, position, tuple(d + (d >= dim) for d in self.dims))


def file_pieces(
    recording: InitRecording, weight: StorageView, before: int | None = None
) -> list[FilePiece] | None:
    """The pieces that make up this tensor, but for its dtype; None if it was computed otherwise.

    Args:
        recording: how the tensor was made.
        weight: the tensor.
        before: count only operators before this one.
    """
    if weight.strides != _contiguous(weight.shape):
        return None
    file = recording.files.get(weight.storage)
    found = recording.last_writer(weight.storage)
    if file is not None:
        if found is not None or file.dtype != weight.dtype:
            return None
        start = file.start + weight.offset * file.dtype.itemsize
        whole = tuple(slice(0, size) for size in weight.shape)
        view = FileTensor(file.file, start, weight.shape, file.dtype)
        return [FilePiece(view, whole, tuple(range(len(weight.shape))))]
    if found is None or (before is not None and found[0] >= before) or not weight.fills_storage:
        return None
    index, op = found
    packet, arguments = op.func.overloadpacket, dict(op.named_arguments())
    made = op.args[0] if packet is aten.copy_ else op.makes.get(0)
    if made != weight:
        return None
    if packet in (aten.copy_, aten._to_copy, aten.clone):
        return _of_parts(
            recording, [arguments["src" if packet is aten.copy_ else "self"]], weight, index
        )
    if packet in (aten.cat, aten.stack):
        dim = arguments.get("dim", 0) % len(weight.shape)
        return _of_parts(recording, arguments["tensors"], weight, index, dim, packet is aten.stack)
    return None


def _of_parts(
    recording: InitRecording,
    parts: Sequence[Any],
    weight: StorageView,
    index: int,
    dim: int | None = None,
    stacked: bool = False,
) -> list[FilePiece] | None:
    """The pieces of tensors that are joined along `dim`; None: of the only one."""
    joined: list[FilePiece] = []
    start = 0
    for place, part in enumerate(parts):
        if not isinstance(part, StorageView) or (dim is None and part.shape != weight.shape):
            return None
        pieces = file_pieces(recording, part, index)
        if pieces is None:
            return None
        for piece in pieces:
            if not _holds_all(part.dtype, piece.file.dtype):
                return None  # a dtype on the way that rounds
            if dim is None:
                joined.append(piece)
            else:
                joined.append(piece.stacked(dim, place) if stacked else piece.inside(dim, start))
        start += 0 if dim is None or stacked else part.shape[dim]
    return joined


def fill_from_files(pieces: Sequence[FilePiece], shard: LocalShard, dtype: torch.dtype) -> None:
    """Write a shard's part of a weight, and read no other bytes. `dtype`: of the weight when the
    model was built."""
    for local, position in shard.chunks:
        for piece in pieces:
            common = index_overlap(position, piece.position)
            if common is not None:
                target = shard.tensor[shift_index(common, position, local)]
                target.copy_(piece.read(common).to(dtype))


def _holds_all(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether each value of one dtype is one of the other, as far as floating-point dtypes tell."""
    if wide == narrow:
        return True
    if not (wide.is_floating_point and narrow.is_floating_point):
        return False
    one, other = torch.finfo(wide), torch.finfo(narrow)
    return one.eps <= other.eps and one.max >= other.max and one.tiny <= other.tiny


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())
