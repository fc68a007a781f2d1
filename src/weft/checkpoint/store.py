"""Checkpoints: saved by global name, read back under any other layout.

    step-000100/
        rank-00000-000.safetensors      the local tensors of this rank's pieces, each under its global name
        rank-00001-000.safetensors
        index.json                      for each global tensor: shape, dtype, which part lies in which file;
                                        for each file: size and checksum; the scalars; the meta data

A chunk says where a part of a file's tensor lies in the global tensor, so a rank that wants other
chunks reads just the overlap of the two. Everything is written to `.step-000100.partial`, the index
last, and the folder then renamed: what carries a step's name is complete.

Written straight on safetensors and not through torch.distributed.checkpoint: that keeps its
metadata in a pickle, and its safetensors storage keys a file by tensor name alone (two chunks of
one tensor on one rank collide), guesses the global shape from the chunks it finds, and checks
neither completeness nor contents. A storage of our own below it would need all of this file, to
save the few lines that intersect two boxes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Self
from zlib import crc32

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from weft.core import (
    CheckpointError,
    DamagedCheckpoint,
    Index,
    LocalShard,
    WeftError,
    coverage_flaw,
    index_overlap,
    shift_index,
    whole_shard,
)

CHECKPOINTS = "checkpoints"  # the folder of a run that holds them
FILE_BYTES = 1 << 29  # a file is closed once it holds this much: bounds the host memory of a save
BLOCK_BYTES = 1 << 22  # written or read, and summed, at once

_INDEX = "index.json"
_FORMAT, _VERSION = "weft checkpoint", 1
_STEP = re.compile(r"step-([0-9]{6,})")
_FILE = re.compile(r"rank-[0-9]+-[0-9]+\.safetensors")


@dataclass(frozen=True)
class StoredTensor:
    """One global tensor of a checkpoint. Its chunks: (file, where in the file's tensor, where in
    the global tensor)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[tuple[str, Index, Index], ...]


@dataclass(frozen=True)
class StoredFile:
    """What a file must be to be the one that was written."""

    size_bytes: int
    crc32: int


@dataclass(frozen=True)
class CheckpointIndex:
    """The index of one checkpoint."""

    step: int
    scalars: dict[str, Any]
    meta: dict[str, Any]
    tensors: dict[str, StoredTensor]  # by global name
    files: dict[str, StoredFile]


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the `last` ones, and each whose step is a multiple of `every` (0: no
    others)."""

    last: int = 1
    every: int = 0

    def gone(self, steps: Sequence[int]) -> list[int]:
        """Those of these steps, in ascending order, that do not stay."""
        return [
            step
            for step in steps[: max(0, len(steps) - self.last)]
            if not (self.every and step % self.every == 0)
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
    """Write the checkpoint of this step into folder/step-NNNNNN. Called by all ranks together, with
    one shared folder.

    `scalars` and `meta` are JSON values, taken from rank 0. A checkpoint of the same step is
    replaced. `group`: through which all ranks agree, where it is not the default one. Raises
    CheckpointError on every rank if any rank fails; nothing is then published and older checkpoints
    stay as they are.
    """
    rank, _ = _place()
    final = checkpoint_path(folder, step)
    partial = folder / f".{final.name}.partial"
    fix = (
        "see that the disk has room and that every rank may write to this folder; older checkpoints"
        " are intact"
    )
    try:
        with _together(partial, fix, group):
            if step < 0 or keep.last < 1:
                raise CheckpointError(
                    "keep", keep.last, f"at step {step}", "steps start at 0; keep at least 1"
                )
            _dump_json(
                [scalars, meta]
            )  # what JSON cannot hold is refused before anything is written
            if rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                _sweep(folder)
                partial.mkdir()
        with _together(partial, fix, group):
            tensors, files = _write(partial, rank, pieces)
        written = _gather((tensors, files), group)
        with _together(partial, fix, group):
            if rank == 0:
                _write_index(partial, _merge(step, scalars, meta, written))
                if final.exists():
                    _hide(final)
                partial.rename(final)
                _fsync(folder)
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    with _together(folder, "remove old checkpoints by hand; the new one is complete", group):
        if rank == 0:
            others = [other for other in saved_steps(folder) if other != step]
            for old in replace(keep, last=keep.last - 1).gone(others):
                _hide(checkpoint_path(folder, old))
            _sweep(folder)


class AsyncCheckpointer:
    """Saves beside training: `save` returns when this rank's part is copied to host memory, and the
    files are written by a thread, one checkpoint after the other. All ranks make it together, and
    call it together."""

    def __init__(self) -> None:
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._group = (
            None if alone else dist.new_group(backend="gloo")
        )  # no collective of training meets its own
        self._host: dict[
            str, Tensor
        ] = {}  # where copies go, again and again: new memory would cost as much as a copy
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        folder: Path,
        step: int,
        pieces: Iterable[LocalShard],
        scalars: dict,
        meta: dict,
        keep: Retention,
        unless: Callable[[Sequence[LocalShard]], str | None] = lambda pieces: None,
    ) -> None:
        """As `checkpoint.save`, whose errors come when it is waited for: by `wait`, or the next
        save. `unless`, asked of this rank's copies, says on any rank why nothing is to be written:
        a WeftError on all."""
        self.wait()
        held = [self._copied(piece) for piece in pieces]
        if any(piece.tensor.is_pinned() for piece in held if not piece.tensor.is_meta):
            torch.cuda.synchronize()

        def run() -> None:
            try:
                reason = next(filter(None, _everywhere(unless(held), self._group)), None)
                if reason is not None:
                    raise WeftError(reason)
                save_checkpoint(folder, step, held, scalars, meta, keep, self._group)
            except BaseException as error:
                self._error = error

        # a daemon: a process that ends because another one died does not wait for what that one was
        # to write
        self._thread = threading.Thread(target=run, name="weft checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the last one is on disk. Raises what it failed with."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _copied(self, piece: LocalShard) -> LocalShard:
        if not piece.writer or not piece.chunks:  # only its name is told
            return replace(piece, tensor=torch.empty_like(piece.tensor, device="meta"))
        tensor, host = piece.tensor.detach(), self._host.get(piece.name)
        if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._host[piece.name] = host
        host.copy_(tensor, non_blocking=True)
        return replace(piece, tensor=host)


def load_checkpoint(folder: Path, step: int | None, pieces: Iterable[LocalShard]) -> dict[str, Any]:
    """Fill the pieces in place, bit for bit, from the checkpoint of this step (None: the latest);
    returns the scalars.

    Called by all ranks together, in any layout. Tensors that no piece names are not read. Raises
    CheckpointError on every rank if any rank finds the checkpoint absent, foreign, incomplete or
    damaged, or a name, shape or dtype that it does not hold. All of that is checked, every file's
    checksum included, before the first tensor is changed.
    """
    rank, world = _place()
    fix = "see that every rank can read this folder"
    with _together(folder, fix):
        chosen = latest_step(folder) if step is None else step
    chosen = _everywhere(chosen)[0]
    with _together(folder, fix):
        pieces = list(pieces)
        contents = read_index(folder, chosen)
        path = checkpoint_path(folder, contents.step)
        for piece in pieces:
            _check_piece(piece, contents)
        CheckpointReader(path, contents).check(rank, world)
    with _together(path, fix), CheckpointReader(path, contents) as reader:
        for piece in pieces:
            reader.fill(piece)
    return contents.scalars


class CheckpointReader:
    """Reads tensors out of a checkpoint's folder, a part at a time; a context."""

    def __init__(self, path: Path, contents: CheckpointIndex):
        self._path, self._contents = path, contents
        self._stack = ExitStack()
        self._opened: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def check(self, rank: int = 0, world: int = 1) -> None:
        """Raises DamagedCheckpoint unless every file is what was written. Of several ranks each
        hashes its share."""
        files = self._contents.files
        for name, file in files.items():
            _check_size(self._path / name, file)
        for name in sorted(files)[rank::world]:
            _check_crc(self._path / name, files[name])

    @torch.no_grad()
    def fill(self, piece: LocalShard) -> None:
        """Copy what a piece has of its global tensor into it."""
        target = piece.tensor.detach()
        for local, position in piece.chunks:
            for file, stored_local, stored_position in self._contents.tensors[piece.name].chunks:
                common = index_overlap(position, stored_position)
                if common is None:
                    continue
                if file not in self._opened:
                    self._opened[file] = self._stack.enter_context(
                        safe_open(self._path / file, framework="pt")
                    )
                part = self._opened[file].get_slice(piece.name)[
                    shift_index(common, stored_position, stored_local)
                ]
                target[shift_index(common, position, local)].copy_(part)

    def whole(self, name: str) -> Tensor:
        """A global tensor."""
        stored = self._contents.tensors[name]
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        self.fill(whole_shard(name, tensor))
        return tensor


def checkpoint_path(folder: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return folder / f"step-{step:06d}"


def latest_step(folder: Path) -> int | None:
    """The highest step that has a complete checkpoint here; None if there is none."""
    return max(saved_steps(folder), default=None)


def quarantine_latest(folder: Path) -> bool:
    """Take the latest checkpoint out of sight, if there is one before it; whether that is so.
    Nothing is deleted."""
    here = saved_steps(folder)
    if len(here) < 2:
        return False
    latest_one = checkpoint_path(folder, here[-1])
    number = len([*folder.glob(f"{latest_one.name}.damaged*")])
    latest_one.rename(folder / f"{latest_one.name}.damaged{number or ''}")
    return True


def read_index(folder: Path, step: int | None = None) -> CheckpointIndex:
    """What the checkpoint of this step (None: the latest) holds, from its index alone. Raises
    CheckpointError."""
    here = saved_steps(folder)
    chosen = max(here, default=None) if step is None else step
    if chosen not in here:
        wanted = (
            "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
        )
        raise CheckpointError(
            "checkpoint", str(folder), f"{wanted} is here", f"here are steps: {here or 'none'}"
        )
    return _read_index(checkpoint_path(folder, chosen) / _INDEX, chosen)


# ---- the ranks together --------------------------------------------------------------------------


def _place() -> tuple[int, int]:
    """(rank, world) of the default group; one process where there is none."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _everywhere(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, in rank order, on every rank."""
    values = [value] * _place()[1]
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's value, in rank order, on rank 0; elsewhere an empty list."""
    rank, world = _place()
    values = [value] * world if rank == 0 else []
    if world > 1:
        dist.gather_object(value, values or None, group=group)
    return values


@contextmanager
def _together(path: Path, fix: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """What fails on one rank in this block is raised on every rank, as a CheckpointError. Leaving
    it is a barrier."""
    cause: Exception | None = None
    facts: tuple[type[CheckpointError], str, object, str, str] | None = None
    try:
        yield
    except CheckpointError as error:
        cause, facts = error, (type(error), error.field, error.value, error.problem, error.fix)
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        problem = f"rank {_place()[0]} failed: {type(error).__name__}: {error}"
        cause, facts = error, (CheckpointError, "checkpoint", str(path), problem, fix)
    failed = [each for each in _everywhere(facts, group) if each is not None]
    if failed:
        kind, *told = failed[0]
        raise kind(*told) from cause


# ---- writing -------------------------------------------------------------------------------------


def _write(
    folder: Path, rank: int, pieces: Iterable[LocalShard]
) -> tuple[dict[str, StoredTensor], dict[str, StoredFile]]:
    """Write this rank's files; returns what they hold. Names that others write are listed too,
    without chunks, so that rank 0 can tell a tensor that nobody wrote."""
    tensors: dict[str, StoredTensor] = {}
    files: dict[str, StoredFile] = {}

    def named() -> Iterator[LocalShard]:
        for piece in pieces:
            if piece.name in tensors:
                problem = f"rank {rank} has it twice"
                raise CheckpointError(
                    "tensor", piece.name, problem, "give each tensor its own name"
                )
            tensors[piece.name] = StoredTensor(tuple(piece.shape), piece.tensor.dtype, ())
            if piece.writer and piece.chunks:
                yield piece

    for number, batch in enumerate(_batches(named())):
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
            "dtype": _dtype_name(tensors[name].dtype),
            "shape": list(tensors[name].shape),
            "data_offsets": [end - tensors[name].nbytes, end],
        }
        for name, end in zip(ordered, ends, strict=True)
    }
    text = _dump_json(header).encode()
    text += b" " * (-len(text) % 8)

    def parts() -> Iterator[memoryview]:
        yield memoryview(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            tensor = tensors[name].cpu().contiguous()
            row = tensor.as_strided((tensor.numel(),), (1,))  # a single element may have any stride
            data = memoryview(row.view(torch.uint8).numpy())
            for start in range(0, len(data), BLOCK_BYTES):
                yield data[start : start + BLOCK_BYTES]

    return _write_file(path, parts())


@cache
def _dtype_name(dtype: torch.dtype) -> str:
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


def _merge(
    step: int,
    scalars: dict,
    meta: dict,
    written: list[tuple[dict[str, StoredTensor], dict[str, StoredFile]]],
) -> CheckpointIndex:
    """One index of all ranks' parts. Raises CheckpointError unless every element of every tensor
    was written once."""
    tensors: dict[str, StoredTensor] = {}
    files: dict[str, StoredFile] = {}
    for rank, (own_tensors, own_files) in enumerate(written):
        files |= own_files
        for name, own in own_tensors.items():
            known = tensors.setdefault(name, replace(own, chunks=()))
            if (own.shape, own.dtype) != (known.shape, known.dtype):
                problem = (
                    f"is {known.dtype} {known.shape} on one rank and {own.dtype} {own.shape} on"
                    f" rank {rank}"
                )
                raise CheckpointError(
                    "tensor", name, problem, "all ranks must agree on the global tensor"
                )
            tensors[name] = replace(known, chunks=known.chunks + own.chunks)
    for name, tensor in tensors.items():
        _check_complete(name, tensor)
    return CheckpointIndex(step, scalars, meta, tensors, files)


def _write_index(folder: Path, contents: CheckpointIndex) -> None:
    body = {
        "step": contents.step,
        "scalars": contents.scalars,
        "meta": contents.meta,
        "files": {name: [file.size_bytes, file.crc32] for name, file in contents.files.items()},
        "tensors": {
            name: {
                "shape": tensor.shape,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "chunks": [
                    [file, _to_json(local), _to_json(position)]
                    for file, local, position in tensor.chunks
                ],
            }
            for name, tensor in contents.tensors.items()
        },
    }
    body = json.loads(
        _dump_json(body)
    )  # as a reader will see it, so that the checksum is of the same text
    index = {
        "format": _FORMAT,
        "version": _VERSION,
        "crc32": crc32(_dump_json(body).encode()),
        **body,
    }
    _write_file(folder / _INDEX, [_dump_json(index).encode()])
    _fsync(folder)


def _write_file(path: Path, parts: Iterable[bytes | memoryview]) -> StoredFile:
    size_bytes = checksum = 0
    with open(path, "xb") as file:
        for part in parts:
            file.write(part)
            size_bytes, checksum = size_bytes + len(part), crc32(part, checksum)
        file.flush()
        os.fsync(file.fileno())
    return StoredFile(size_bytes, checksum)


def _hide(checkpoint: Path) -> None:
    """Make a leftover of a checkpoint, in one move: a crash while it is removed leaves no half
    checkpoint in sight."""
    checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.old.partial"))


def _sweep(folder: Path) -> None:
    """Remove what crashed or replaced checkpoints left."""
    for leftover in folder.glob(".step-*.partial"):
        shutil.rmtree(leftover)


def _fsync(folder: Path) -> None:
    """Make names in this folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _dump_json(value: object) -> str:
    return json.dumps(value)


def _to_json(index: Index) -> list[list[int]]:
    return [[part.start, part.stop] for part in index]


# ---- reading -------------------------------------------------------------------------------------


def saved_steps(folder: Path) -> list[int]:
    """Steps that have a complete checkpoint, ascending."""
    names = [_STEP.fullmatch(path.parent.name) for path in folder.glob(f"step-*/{_INDEX}")]
    return sorted(int(name[1]) for name in names if name)


def _read_index(path: Path, step: int) -> CheckpointIndex:
    foreign = "use a folder that weft saved; remove a damaged one to go on from the one before"
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            "checkpoint", str(path), f"cannot be read: {error}", foreign
        ) from error
    try:
        index = json.loads(text)
        as_written = _dump_json(index).encode() == text
        form, version, checksum = index.pop("format"), index.pop("version"), index.pop("crc32")
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise DamagedCheckpoint(
            "checkpoint", str(path), "is not the index of a weft checkpoint", foreign
        ) from error
    if form != _FORMAT or version != _VERSION:
        problem = f"is {form!r} version {version!r}, not {_FORMAT!r} version {_VERSION}"
        raise CheckpointError("checkpoint", str(path), problem, foreign)
    if not as_written or crc32(_dump_json(index).encode()) != checksum:
        raise DamagedCheckpoint(
            "checkpoint", str(path), "was changed after it was written", foreign
        )
    try:
        contents = CheckpointIndex(
            step=index["step"],
            scalars=index["scalars"],
            meta=index["meta"],
            tensors={name: _to_stored(entry) for name, entry in index["tensors"].items()},
            files={name: StoredFile(*entry) for name, entry in index["files"].items()},
        )
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise DamagedCheckpoint(
            "checkpoint", str(path), "is not the index of a weft checkpoint", foreign
        ) from error
    for name in {
        file for tensor in contents.tensors.values() for file, _, _ in tensor.chunks
    } | contents.files.keys():
        if name not in contents.files or not _FILE.fullmatch(
            name
        ):  # never a path that leads out of the folder
            raise DamagedCheckpoint("checkpoint", str(path), f"names a file {name!r}", foreign)
    for name, tensor in contents.tensors.items():
        _check_complete(name, tensor)
    if contents.step != step:
        problem = f"is the index of step {contents.step}"
        raise CheckpointError(
            "checkpoint", str(path), problem, f"name the folder step-{contents.step:06d} again"
        )
    return contents


def _to_stored(entry: dict[str, Any]) -> StoredTensor:
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(entry["dtype"])
    chunks = tuple(
        (file, _to_index(local), _to_index(position)) for file, local, position in entry["chunks"]
    )
    return StoredTensor(tuple(entry["shape"]), dtype, chunks)


def _to_index(pairs: list[list[int]]) -> Index:
    return tuple(slice(start, stop) for start, stop in pairs)


def _check_complete(name: str, tensor: StoredTensor) -> None:
    problem = coverage_flaw((position for _, _, position in tensor.chunks), tensor.shape)
    if problem:
        raise CheckpointError(
            "tensor",
            name,
            f"{problem} of those written",
            "each element must have exactly one writer",
        )


def _check_piece(piece: LocalShard, contents: CheckpointIndex) -> None:
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


def _check_size(path: Path, file: StoredFile) -> None:
    fix = "copy the checkpoint again, or remove its folder to go on from the one before"
    if not path.is_file():
        raise DamagedCheckpoint("checkpoint", str(path), "the file is missing", fix)
    if path.stat().st_size != file.size_bytes:
        problem = f"has {path.stat().st_size} bytes where {file.size_bytes} were written"
        raise DamagedCheckpoint("checkpoint", str(path), problem, fix)


def _check_crc(path: Path, file: StoredFile) -> None:
    checksum = 0
    with open(path, "rb") as data:
        while block := data.read(BLOCK_BYTES):
            checksum = crc32(block, checksum)
    if checksum != file.crc32:
        problem = "its checksum is not the one that was written"
        raise DamagedCheckpoint(
            "checkpoint",
            str(path),
            problem,
            "copy it again, or remove its folder to go on from the one before",
        )
