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
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from weft.core import (
    CheckpointError,
    DamagedCheckpoint,
    Index,
    coverage_flaw,
)

CHECKPOINTS = "checkpoints"  # the folder of a run that holds them
INDEX_FILE = "index.json"
_FORMAT, _VERSION = "weft checkpoint", 1
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
    return sorted(int(name[1]) for name in names if name)


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
        raise CheckpointError(
            "checkpoint", str(folder), f"{wanted} is here", f"here are steps: {here or 'none'}"
        )
    return _read_index(checkpoint_path(folder, chosen) / INDEX_FILE, chosen)


def _read_index(path: Path, step: int) -> CheckpointIndex:
    foreign = "use a folder that weft saved; to resume from an older checkpoint, remove this one"
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            "checkpoint", str(path), f"cannot be read: {error}", foreign
        ) from error
    try:
        index = json.loads(text)
        as_written = to_json(index).encode() == text
        form, version, checksum = index.pop("format"), index.pop("version"), index.pop("crc32")
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise DamagedCheckpoint(
            "checkpoint", str(path), "is not the index of a weft checkpoint", foreign
        ) from error
    if form != _FORMAT or version != _VERSION:
        problem = f"is {form!r} version {version!r}, not {_FORMAT!r} version {_VERSION}"
        raise CheckpointError("checkpoint", str(path), problem, foreign)
    if not as_written or crc32(to_json(index).encode()) != checksum:
        raise DamagedCheckpoint(
            "checkpoint", str(path), "was changed after it was written", foreign
        )
    try:
        contents = CheckpointIndex(
            index["step"], index["scalars"], index["meta"], *written_from(index)
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
        check_complete(name, tensor)
    if contents.step != step:
        problem = f"is the index of step {contents.step}"
        raise CheckpointError(
            "checkpoint", str(path), problem, f"name the folder step-{contents.step:06d} again"
        )
    return contents


def written_from(entries: dict[str, Any]) -> Written:
    """Tensors and files, of what `written_entries` gives."""
    tensors = {name: _to_stored(entry) for name, entry in entries["tensors"].items()}
    return tensors, {name: StoredFile(*entry) for name, entry in entries["files"].items()}


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
