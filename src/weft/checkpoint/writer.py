"""Saving a checkpoint: every rank writes its shards, rank 0 the index, and then publishes it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from zlib import crc32

import torch
import torch.distributed as dist
from safetensors.torch import save as to_safetensors
from torch import Tensor

from weft.core import (
    CheckpointError,
    LocalShard,
    gather_json,
)

from .index import (
    INDEX_FILE,
    StoredFile,
    StoredTensor,
    checkpoint_path,
    index_text,
    merge_indexes,
    saved_steps,
    to_json,
    written_entries,
    written_from,
)
from .ranks import raise_on_every_rank, rank_and_world

FILE_BYTES = 1 << 29  # a file is closed once it holds this much: bounds the host memory of a save
BLOCK_BYTES = 1 << 22  # written or read, and summed, at once


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the `last` ones, each whose step is a multiple of `every` (0: none of
    these), and those of `steps`."""

    last: int = 1
    every: int = 0
    steps: tuple[int, ...] = ()

    def steps_to_delete(self, steps: Sequence[int]) -> list[int]:
        """Those of these steps, given in ascending order, whose checkpoints do not stay."""
        return [
            step
            for step in steps[: max(0, len(steps) - self.last)]
            if not (self.every and step % self.every == 0) and step not in self.steps
        ]


def save_checkpoint(
    folder: Path,
    step: int,
    pieces: Iterable[LocalShard],
    scalars: dict,
    meta: dict,
    keep: Retention,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint to `folder/step-NNNNNN`. All ranks call it together.

    Args:
        folder: Holds the checkpoints of a run. All ranks share it.
        step: The step's number. A checkpoint of the same step is replaced.
        pieces: This rank's shards of the global tensors.
        scalars: JSON values that resuming needs. Those of rank 0 are saved.
        meta: JSON values for people and tools. Those of rank 0 are saved.
        keep: Which older checkpoints stay.
        group: The process group of all ranks (default: the default group).

    Raises:
        CheckpointError: On every rank, if any rank fails. The new checkpoint is then discarded and
            older ones are left as they are.
    """
    rank, _ = rank_and_world()
    final = checkpoint_path(folder, step)
    partial = folder / f".{final.name}.partial"
    fix = (
        "free some disk space, and let every rank write to this folder; older checkpoints are"
        " intact"
    )
    try:
        with raise_on_every_rank(partial, fix, group):
            if step < 0 or keep.last < 1:
                raise CheckpointError(
                    "keep", keep.last, f"at step {step}", "steps start at 0; keep at least 1"
                )
            to_json([scalars, meta])  # what JSON cannot hold is refused before anything is written
            if rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                _remove_leftovers(folder)
                partial.mkdir()
        with raise_on_every_rank(partial, fix, group):
            tensors, files = write_shards(partial, rank, pieces)
        entries = gather_json(written_entries(tensors, files), group, only_first=True)
        written = [written_from(each) for each in entries]
        with raise_on_every_rank(partial, fix, group):
            if rank == 0:
                contents = merge_indexes(step, scalars, meta, written)
                write_file(partial / INDEX_FILE, [index_text(contents).encode()])
                sync_folder(partial)
                if final.exists():
                    _retire(final)
                partial.rename(final)
                sync_folder(folder)
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    with raise_on_every_rank(
        folder, "delete old checkpoints by hand; the new one is complete", group
    ):
        if rank == 0:
            others = [other for other in saved_steps(folder) if other != step]
            for old in replace(keep, last=keep.last - 1).steps_to_delete(others):
                _retire(checkpoint_path(folder, old))
            _remove_leftovers(folder)


def write_shards(
    folder: Path, rank: int, pieces: Iterable[LocalShard]
) -> tuple[dict[str, StoredTensor], dict[str, StoredFile]]:
    """Write this rank's files and return their contents. Tensors that other ranks write are listed
    without chunks, so that rank 0 notices a tensor that no rank wrote."""
    tensors: dict[str, StoredTensor] = {}
    files: dict[str, StoredFile] = {}

    def check_names() -> Iterator[LocalShard]:
        for piece in pieces:
            if piece.name in tensors:
                problem = f"rank {rank} has it twice"
                raise CheckpointError(
                    "tensor", piece.name, problem, "give each tensor a name of its own"
                )
            tensors[piece.name] = StoredTensor(tuple(piece.shape), piece.tensor.dtype, ())
            if piece.writer and piece.chunks:
                yield piece

    for number, batch in enumerate(_batches(check_names())):
        name = f"rank-{rank:05d}-{number:03d}.safetensors"
        files[name] = _write_tensors(
            folder / name, {piece.name: piece.tensor.detach() for piece in batch}
        )
        for piece in batch:
            tensors[piece.name] = replace(
                tensors[piece.name], chunks=tuple((name, *chunk) for chunk in piece.chunks)
            )
    return tensors, files


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> StoredFile:
    """A safetensors file, straight from the tensors' memory: the library's own writer copies all of
    it first.

    https://github.com/huggingface/safetensors#format: the header's length in 8 bytes, the header,
    the tensors.
    """
    ordered = sorted(
        tensors, key=lambda name: (-tensors[name].element_size(), name)
    )  # so that each is aligned
    ends = [*accumulate(tensors[name].nbytes for name in ordered)]
    header = {
        name: {
            "dtype": dtype_name(tensors[name].dtype),
            "shape": list(tensors[name].shape),
            "data_offsets": [end - tensors[name].nbytes, end],
        }
        for name, end in zip(ordered, ends, strict=True)
    }
    text = to_json(header).encode()
    text += b" " * (-len(text) % 8)

    def parts() -> Iterator[memoryview]:
        yield memoryview(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            tensor = tensors[name].cpu().contiguous()
            row = tensor.as_strided((tensor.numel(),), (1,))  # a single element may have any stride
            data = memoryview(row.view(torch.uint8).numpy())
            for start in range(0, len(data), BLOCK_BYTES):
                yield data[start : start + BLOCK_BYTES]

    return write_file(path, parts())


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """What safetensors calls it."""
    return json.loads(to_safetensors({"": torch.empty(0, dtype=dtype)})[8:])[""]["dtype"]


def _batches(pieces: Iterable[LocalShard]) -> Iterator[list[LocalShard]]:
    """Consecutive pieces, cut after the one that brings a batch to FILE_BYTES."""
    batch: list[LocalShard] = []
    batch_bytes = 0
    for piece in pieces:
        batch.append(piece)
        batch_bytes += piece.tensor.nbytes
        if batch_bytes >= FILE_BYTES:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> StoredFile:
    size_bytes = checksum = 0
    with open(path, "xb") as file:
        for part in parts:
            file.write(part)
            size_bytes, checksum = size_bytes + len(part), crc32(part, checksum)
        file.flush()
        os.fsync(file.fileno())
    return StoredFile(size_bytes, checksum)


def _retire(checkpoint: Path) -> None:
    """Rename a checkpoint so that `_remove_leftovers` deletes it. A crash during the deletion then
    leaves no incomplete checkpoint under a step's name."""
    checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.old.partial"))


def _remove_leftovers(folder: Path) -> None:
    """Delete what crashed saves and replaced checkpoints left."""
    for leftover in folder.glob(".step-*.partial"):
        shutil.rmtree(leftover)


def sync_folder(folder: Path) -> None:
    """Flush the names in this folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
