"""The index of a checkpoint: which part of each global tensor is in which file.

    step-000100/
        rank-00000-000.safetensors      this rank's shards, each under its global name
        rank-00001-000.safetensors
        index.json                      for each global tensor: shape, dtype, and its chunks;
                                        for each file: size and checksum; scalars; meta data

A chunk says where a part of a file's tensor lies in the global tensor, so a rank that wants other
chunks reads only the overlap. Everything is written to `.step-000100.partial`, the index last, and
the folder is then renamed: a folder that has a step's name is complete.

weft writes safetensors itself and does not use torch.distributed.checkpoint (DCP). DCP keeps its
metadata in a pickle. Its safetensors storage keys a file by tensor name alone (two chunks of one
tensor on one rank collide), guesses the global shape from the chunks that it finds, and checks
neither completeness nor contents. A storage of our own below DCP would need all of this package to
save the few lines that intersect two boxes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from weft.core import (
    CheckpointError,
    DamagedCheckpoint,
    Index,
    coverage_flaw,
    index_shape,
    read_file,
)

CHECKPOINTS = "checkpoints"  # the folder of a run that holds them
INDEX_FILE = "index.json"
MOST_INDEX_BYTES = 1 << 30
_FORMAT, _VERSION = "weft checkpoint", 1
_BEGINS = b'{"format": '
_MOST = (1 << 63) - 1  # elements, bytes, and steps
_MOST_DIMS = 64  # as torch can do arithmetic with
_DEEPEST = 16  # levels of scalars and meta data
_STEP = re.compile(r"step-([0-9]{6,})")
_FILE = re.compile(r"rank-[0-9]+-[0-9]+\.safetensors")


@dataclass(frozen=True)
class StoredTensor:
    """One global tensor of a checkpoint. A chunk is (file, region of the file's tensor, region of
    the global tensor)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[tuple[str, Index, Index], ...]


@dataclass(frozen=True)
class StoredFile:
    """Size and checksum of a file as it was written."""

    size_bytes: int
    crc32: int


# what one rank wrote, by global name of a tensor and name of a file
Written = tuple[dict[str, StoredTensor], dict[str, StoredFile]]


@dataclass(frozen=True)
class CheckpointIndex:
    """The index of one checkpoint."""

    step: int
    scalars: dict[str, Any]
    meta: dict[str, Any]
    tensors: dict[str, StoredTensor]  # by global name
    files: dict[str, StoredFile]


def checkpoint_path(folder: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return folder / f"step-{step:06d}"


def saved_steps(folder: Path) -> list[int]:
    """The steps with a complete checkpoint in this folder, ascending."""
    names = [_STEP.fullmatch(path.parent.name) for path in folder.glob(f"step-*/{INDEX_FILE}")]
    steps = sorted({int(name[1]) for name in names if name})
    # one number may be written in several ways, one of which is weft's
    return [step for step in steps if os.path.exists(checkpoint_path(folder, step) / INDEX_FILE)]


def latest_step(folder: Path) -> int | None:
    """The highest step that has a complete checkpoint here; None if there is none."""
    return max(saved_steps(folder), default=None)


def quarantine_latest(folder: Path) -> bool:
    """Rename the latest checkpoint, so that the one before it becomes the latest. Nothing is
    deleted. Returns False, and does nothing, if there is no checkpoint before it."""
    here = saved_steps(folder)
    if len(here) < 2:
        return False
    latest_one = checkpoint_path(folder, here[-1])
    number = len([*folder.glob(f"{latest_one.name}.damaged*")])
    latest_one.rename(folder / f"{latest_one.name}.damaged{number or ''}")
    return True


def read_index(folder: Path, step: int | None = None) -> CheckpointIndex:
    """Read the index of the checkpoint of this step (None: the latest). No tensor is read. Raises
    CheckpointError."""
    here = saved_steps(folder)
    chosen = max(here, default=None) if step is None else step
    if chosen not in here:
        wanted = (
            "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
        )
        fix = "check the path; a run saves checkpoints if checkpoint.every is set"
        if here:
            fix = f"the steps here are {here}"
        outer = next((p for p in folder.parents if p.name == folder.name), None)
        if outer is not None:  # a folder inside of a run's was named
            fix = f"name the run folder, {outer.parent}"
        raise CheckpointError("checkpoint", str(folder), f"{wanted} is here", fix)
    return _read_index(checkpoint_path(folder, chosen) / INDEX_FILE, chosen)


def _read_index(path: Path, step: int) -> CheckpointIndex:
    fix = "use a folder that weft saved; to resume from an older checkpoint, remove this one"

    def damaged(problem: str) -> DamagedCheckpoint:
        return DamagedCheckpoint("checkpoint", str(path), problem, fix)

    try:
        check_inside(path)
        text = read_file(path, MOST_INDEX_BYTES)
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        raise CheckpointError("checkpoint", str(path), problem, fix) from error
    foreign = "is not the index of a weft checkpoint"
    if not text.startswith(_BEGINS):
        raise damaged(foreign)
    try:
        index = json.loads(text)
        as_written = to_json(index).encode() == text
        form, version, checksum = index.pop("format"), index.pop("version"), index.pop("crc32")
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise damaged(foreign) from error
    if form != _FORMAT or version != _VERSION:
        problem = f"is {form!r} version {version!r}, not {_FORMAT!r} version {_VERSION}"
        raise CheckpointError("checkpoint", str(path), problem, fix)
    if not as_written or crc32(to_json(index).encode()) != checksum:
        raise damaged("was changed after it was written")
    try:
        found = _whole(index["step"])
        for key in ("scalars", "meta"):
            _check_values(_mapping(index[key]), _DEEPEST)
        contents = CheckpointIndex(found, index["scalars"], index["meta"], *written_from(index))
        _check_files(contents)
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise damaged(f"{foreign} ({error})") from error
    for name, tensor in contents.tensors.items():
        if flaw := coverage_flaw((chunk[2] for chunk in tensor.chunks), tensor.shape):
            raise damaged(f"of tensor {name!r}, {flaw}")
    if contents.step != step:
        problem = f"is the index of step {contents.step}"
        again = f"name the folder step-{contents.step:06d} again"
        raise DamagedCheckpoint("checkpoint", str(path), problem, again)
    return contents


def check_inside(path: Path) -> None:
    """Raises OSError for a link that leads out of the folder of a checkpoint: weft writes none."""
    to = os.path.realpath(path)
    if path.is_symlink() and os.path.dirname(to) != os.path.realpath(path.parent):
        raise OSError(f"is a link that leads out of the folder, to {to}")


def written_from(entries: dict[str, Any]) -> Written:
    """Tensors and files, of what `written_entries` gives. Raises ValueError, TypeError or
    LookupError: it is something else."""
    tensors = {name: _to_stored(entry) for name, entry in _mapping(entries["tensors"]).items()}
    return tensors, {name: _to_file(entry) for name, entry in _mapping(entries["files"]).items()}


def written_entries(
    tensors: Mapping[str, StoredTensor], files: Mapping[str, StoredFile]
) -> dict[str, Any]:
    """What JSON holds of tensors and files, as in `index.json`."""
    return {
        "files": {name: [file.size_bytes, file.crc32] for name, file in files.items()},
        "tensors": {
            name: {
                "shape": tensor.shape,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "chunks": [
                    [file, _pairs_of(local), _pairs_of(position)]
                    for file, local, position in tensor.chunks
                ],
            }
            for name, tensor in tensors.items()
        },
    }


def _to_stored(entry: Any) -> StoredTensor:
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no dtype {entry['dtype']!r}")
    shape = tuple(map(_whole, entry["shape"]))
    if len(shape) > _MOST_DIMS or prod(max(size, 1) for size in shape) * dtype.itemsize > _MOST:
        raise ValueError(f"no tensor has {len(shape)} dims of {list(shape[:4])} ...")
    chunks = tuple(
        (file, _to_index(local), _to_index(position)) for file, local, position in entry["chunks"]
    )
    for file, local, position in chunks:
        if not isinstance(file, str) or index_shape(local) != index_shape(position):
            raise ValueError(f"chunks of {file!r} have two shapes")
    return StoredTensor(shape, dtype, chunks)


def _to_file(entry: Any) -> StoredFile:
    size_bytes, checksum = map(_whole, entry)
    return StoredFile(size_bytes, checksum)


def _to_index(pairs: Any) -> Index:
    return tuple(slice(_whole(start), _whole(stop)) for start, stop in pairs)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError(f"{str(value)[:40]!r} is no number of steps, elements or bytes")
    return value


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{str(value)[:40]!r} stands where names are")
    return value


def _check_values(value: Any, levels: int) -> None:
    """Raises ValueError for what is nested so deeply that it could not be passed on."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if inner and not levels:
        raise ValueError("it is nested too deeply")
    for each in inner:
        _check_values(each, levels - 1)


def _check_files(contents: CheckpointIndex) -> None:
    """Raises ValueError unless chunks are in files of this folder that can hold them."""
    held = dict.fromkeys(contents.files, 0)
    for tensor in contents.tensors.values():
        for file, local, _ in tensor.chunks:
            if file not in held:
                raise ValueError(f"it names a file {file!r} that it does not have")
            held[file] += prod(index_shape(local)) * tensor.dtype.itemsize
    for name, stored in contents.files.items():
        if not _FILE.fullmatch(name):  # never a path that leads out of the folder
            raise ValueError(f"it names a file {name!r}, as weft writes none")
        if held[name] > stored.size_bytes:
            raise ValueError(f"{name} has {stored.size_bytes} bytes, and {held[name]} of tensors")


def merge_indexes(
    step: int,
    scalars: dict,
    meta: dict,
    written: list[Written],
) -> CheckpointIndex:
    """Combine what each rank wrote into one index. Raises CheckpointError unless every element of
    every tensor was written exactly once."""
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
                    "tensor", name, problem, "use the same model and precision on all ranks"
                )
            tensors[name] = replace(known, chunks=known.chunks + own.chunks)
    for name, tensor in tensors.items():
        check_complete(name, tensor)
    return CheckpointIndex(step, scalars, meta, tensors, files)


def check_complete(name: str, tensor: StoredTensor) -> None:
    problem = coverage_flaw((position for _, _, position in tensor.chunks), tensor.shape)
    if problem:
        raise CheckpointError(
            "tensor",
            name,
            f"{problem}",
            "each element must have exactly one writer",
        )


def index_text(contents: CheckpointIndex) -> str:
    """The text of `index.json`, with its own checksum."""
    body = {
        "step": contents.step,
        "scalars": contents.scalars,
        "meta": contents.meta,
        **written_entries(contents.tensors, contents.files),
    }
    # as a reader will parse it, so that both compute the checksum of the same text
    body = json.loads(to_json(body))
    index = {
        "format": _FORMAT,
        "version": _VERSION,
        "crc32": crc32(to_json(body).encode()),
        **body,
    }
    return to_json(index)


def _pairs_of(index: Index) -> list[list[int]]:
    return [[part.start, part.stop] for part in index]


def to_json(value: object) -> str:
    return json.dumps(value)
