"""Loading a checkpoint: each rank checks the files and reads the overlap with its own shards."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.core import (
    CheckpointError,
    DamagedCheckpoint,
    LocalShard,
    gather_json,
    index_overlap,
    shift_index,
    whole_shard,
)

from .index import (
    CheckpointIndex,
    StoredFile,
    check_inside,
    checkpoint_path,
    latest_step,
    read_index,
)
from .ranks import raise_on_every_rank, rank_and_world
from .writer import dtype_name

BLOCK_BYTES = 1 << 22  # written or read, and summed, at once
COPY_AGAIN = "copy the checkpoint again, or remove its folder to resume from the previous one"


def load_checkpoint(folder: Path, step: int | None, pieces: Iterable[LocalShard]) -> dict[str, Any]:
    """Fill `pieces` in place from the checkpoint of this step (None: the latest). All ranks call it
    together, in any layout. Tensors that no shard names are not read. Returns the scalars.

    Raises:
        CheckpointError: On every rank, if any rank finds that the checkpoint is missing,
            incomplete, damaged or not weft's, or that it lacks a name, shape or dtype. No tensor is
            changed before all of this, including every file's checksum, has been checked.
    """
    rank, world = rank_and_world()
    fix = "let every rank read this folder"
    with raise_on_every_rank(folder, fix):
        chosen = latest_step(folder) if step is None else step
    chosen = gather_json(chosen)[0]
    with raise_on_every_rank(folder, fix):
        pieces = list(pieces)
        contents = read_index(folder, chosen)
        path = checkpoint_path(folder, contents.step)
        for piece in pieces:
            _check_shard(piece, contents)
        CheckpointReader(path, contents).check(rank, world)
    with raise_on_every_rank(path, fix), CheckpointReader(path, contents) as reader:
        for piece in pieces:
            reader.fill(piece)
    return contents.scalars


class CheckpointReader:
    """Reads parts of tensors from a checkpoint's folder. Use it as a context manager."""

    def __init__(self, path: Path, contents: CheckpointIndex):
        self._path, self._contents = path, contents
        self._stack = ExitStack()
        self._opened: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def check(self, rank: int = 0, world: int = 1) -> None:
        """Raise DamagedCheckpoint unless every file has the size and checksum with which it was
        written. Each of `world` ranks computes the checksums of its share of the files."""
        files = self._contents.files
        for name, file in files.items():
            check_size(self._path / name, file)
        for name in sorted(files)[rank::world]:
            check_crc(self._path / name, files[name])

    @torch.no_grad()
    def fill(self, piece: LocalShard) -> None:
        """Copy into a shard its part of the global tensor."""
        target = piece.tensor.detach()
        for local, position in piece.chunks:
            for file, stored_local, stored_position in self._contents.tensors[piece.name].chunks:
                common = index_overlap(position, stored_position)
                if common is None:
                    continue
                part = self._open(file).get_slice(piece.name)[
                    shift_index(common, stored_position, stored_local)
                ]
                target[shift_index(common, position, local)].copy_(part)

    def _open(self, name: str) -> Any:
        """A file that holds what the index says of it. Raises DamagedCheckpoint."""
        if name in self._opened:
            return self._opened[name]
        path = self._path / name
        try:
            opened = self._stack.enter_context(safe_open(path, framework="pt"))
            for tensor, stored in self._contents.tensors.items():
                for local in (local for file, local, _ in stored.chunks if file == name):
                    held = opened.get_slice(tensor)
                    if held.get_dtype() != dtype_name(stored.dtype):
                        raise ValueError(f"{tensor!r} is {held.get_dtype()}, not {stored.dtype}")
                    box = zip(local, held.get_shape(), strict=True)
                    if not all(part.stop <= size for part, size in box):
                        raise ValueError(f"{tensor!r} has shape {held.get_shape()}")
        except (SafetensorError, ValueError) as error:
            problem = f"does not hold what the index says ({error})"
            raise DamagedCheckpoint("checkpoint", str(path), problem, COPY_AGAIN) from error
        self._opened[name] = opened
        return opened

    def read_tensor(self, name: str) -> Tensor:
        """Read one global tensor."""
        stored = self._contents.tensors[name]
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        self.fill(whole_shard(name, tensor))
        return tensor


def _check_shard(piece: LocalShard, contents: CheckpointIndex) -> None:
    stored = contents.tensors.get(piece.name)
    where = f"the checkpoint of step {contents.step}"
    if stored is None:
        fix = (
            f"resume with the model and optimizer that wrote it; it holds {len(contents.tensors)}"
            " tensors"
        )
        raise CheckpointError("tensor", piece.name, f"is not in {where}", fix)
    if stored.shape != tuple(piece.shape) or stored.dtype != piece.tensor.dtype:
        problem = (
            f"is {piece.tensor.dtype} {tuple(piece.shape)} here and {stored.dtype} {stored.shape}"
            f" in {where}"
        )
        raise CheckpointError(
            "tensor", piece.name, problem, "resume with the model and precision that wrote it"
        )


def check_size(path: Path, file: StoredFile) -> None:
    """Raises DamagedCheckpoint."""
    try:
        check_inside(path)
        found = path.stat().st_size if path.is_file() else None
    except OSError as error:
        raise DamagedCheckpoint("checkpoint", str(path), str(error), COPY_AGAIN) from error
    if found is None:
        problem = "is not a regular file" if path.exists() else "the file is missing"
        raise DamagedCheckpoint("checkpoint", str(path), problem, COPY_AGAIN)
    if found != file.size_bytes:
        problem = f"has {found} bytes where {file.size_bytes} were written"
        raise DamagedCheckpoint("checkpoint", str(path), problem, COPY_AGAIN)


def check_crc(path: Path, file: StoredFile) -> None:
    checksum = 0
    with open(path, "rb") as data:
        while block := data.read(BLOCK_BYTES):
            checksum = crc32(block, checksum)
    if checksum != file.crc32:
        problem = "its checksum is not the one that was written"
        raise DamagedCheckpoint("checkpoint", str(path), problem, COPY_AGAIN)
