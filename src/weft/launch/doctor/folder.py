"""Checks the folder that a run writes to: permission, speed, and room for checkpoints."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal

from weft.core import RunConfig

from .allreduce_check import rate_text
from .findings import Finding

BYTES = 64 << 20
LEFT_OVER = 2 * BYTES  # free space, below which nothing is written


@dataclass(frozen=True)
class Disk:
    """What was seen of a folder: seconds to write and to read BYTES; None: not tried, for want of
    room."""

    place: str
    kind: str
    free: int
    write_s: float | None = None
    read_s: float | None = None


def folder(path: Path) -> Finding:
    """The nearest folder above the path that exists: a file is written there, read, and taken
    away."""
    place = nearest_folder(path)
    kind, free = _file_system(place), shutil.disk_usage(place).free
    if free < LEFT_OVER:
        return folder_finding(Disk(str(place), kind, free))
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".weft-doctor-") as file:
            return folder_finding(
                Disk(str(place), kind, free, _time_write(file.fileno()), _read(file.fileno()))
            )
    except OSError as error:
        advice = "name another folder, or let this user write there"
        return Finding("folder", "wrong", f"{place} cannot be written to: {error.strerror}", advice)


def folder_finding(seen: Disk) -> Finding:
    """What follows from it."""
    facts = {"folder": seen.place, "kind": seen.kind, "free_bytes": seen.free}
    found = f"{seen.place} ({seen.kind}), {decimal(seen.free)} free"
    if seen.write_s is None or seen.read_s is None:
        return Finding(
            "folder",
            "wrong",
            found,
            "it is full: nothing was written. Make room, or name another",
            facts,
        )
    facts |= {"write_bytes_per_s": BYTES / seen.write_s, "read_bytes_per_s": BYTES / seen.read_s}
    found += f", writes {rate_text(BYTES / seen.write_s)}, reads {rate_text(BYTES / seen.read_s)}"
    if seen.kind in ("tmpfs", "ramfs"):
        return Finding(
            "folder",
            "note",
            found,
            "it is a file system in memory: its files are lost when this host ends",
            facts,
        )
    return Finding("folder", "ok", found, "", facts)


def nearest_folder(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.is_dir())


@dataclass(frozen=True)
class CheckpointSize:
    """How many parameters a checkpoint holds, and its size."""

    parameters: int
    nbytes: int


def checkpoint_room(
    run: RunConfig, path: Path, checkpoint_size: Callable[[RunConfig], CheckpointSize]
) -> Finding:
    """For how many of the run's checkpoints there is room."""
    size = checkpoint_size(run)
    saves = run.checkpoint.every or run.checkpoint.keep_best
    # the next is written before the oldest goes
    kept = run.checkpoint.keep + 1 + run.checkpoint.keep_best if saves else 0
    if run.checkpoint.every and run.checkpoint.keep_every:
        kept += run.train.steps // run.checkpoint.keep_every
    return judge_room(
        size.parameters, size.nbytes, kept, shutil.disk_usage(nearest_folder(path)).free
    )


def judge_room(parameters: int, each: int, kept: int, free: int) -> Finding:
    """A model's parameters, the bytes of each checkpoint, how many are kept at once, and the bytes
    that are free."""
    fit = free // max(1, each)
    facts = {"parameters": parameters, "checkpoint_bytes": each, "kept": kept, "fit": fit}
    found = f"a checkpoint of {parameters:,} parameters takes {decimal(each)}: room for {fit:,}"
    if fit < kept:
        advice = (
            f"the run keeps {kept} at once, one of them being written: keep fewer ([checkpoint]),"
            " or make room"
        )
        return Finding("room", "wrong", found, advice, facts)
    if not kept:
        return Finding(
            "room", "note", found, "the run saves no checkpoint: set checkpoint.every", facts
        )
    return Finding("room", "ok", f"{found}, the run keeps {kept} at once", "", facts)


def _time_write(file: int) -> float:
    """Seconds until BYTES are on the disk."""
    block, began = os.urandom(1 << 20), time.perf_counter()
    for _ in range(BYTES >> 20):
        os.write(file, block)
    os.fsync(file)
    return time.perf_counter() - began


def _read(file: int) -> float:
    """Seconds until they are read, from the disk where the system can be told to forget them."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(file, 0, os.SEEK_SET)
    began = time.perf_counter()
    while os.read(file, 1 << 20):
        pass
    return time.perf_counter() - began


def _file_system(place: Path) -> str:
    """Its kind, as in ext4 or nfs4."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "a folder"
    device, kind = place.stat().st_dev, "a folder"
    for line in lines:
        mount, _, tail = line.partition(" - ")
        major, minor = map(int, mount.split()[2].split(":"))
        if os.makedev(major, minor) == device:
            kind = tail.split()[0]
    return kind
