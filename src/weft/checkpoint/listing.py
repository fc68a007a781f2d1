"""Describe the checkpoints of a run, as data and as text."""

from __future__ import annotations

import time
from math import prod
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from weft.core import printable, short_number

from .index import CHECKPOINTS, checkpoint_path, read_index, saved_steps


def describe_checkpoint(folder: Path, step: int | None) -> dict[str, Any]:
    """The steps saved in a run folder, and the contents of one of them (None: the latest) as its
    index lists them. Raises CheckpointError."""
    contents = read_index(folder / CHECKPOINTS, step)
    place = checkpoint_path(folder / CHECKPOINTS, contents.step)
    kinds: dict[str, list[int]] = {}
    for name, stored in contents.tensors.items():
        count, numel, nbytes = kinds.setdefault(_kind(name), [0, 0, 0])
        size = prod(stored.shape)
        kinds[_kind(name)] = [count + 1, numel + size, nbytes + size * stored.dtype.itemsize]
    return {
        "folder": str(place),
        "steps": saved_steps(folder / CHECKPOINTS),
        "step": contents.step,
        "written": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(place.stat().st_mtime)),
        "meta": contents.meta,
        "scalars": contents.scalars,
        "files": {name: file.size_bytes for name, file in contents.files.items()},
        "kinds": {
            kind: dict(zip(("tensors", "elements", "bytes"), row, strict=True))
            for kind, row in kinds.items()
        },
        "tensors": {
            name: {
                "shape": list(stored.shape),
                "dtype": str(stored.dtype).removeprefix("torch."),
                "parts": len(stored.chunks),
            }
            for name, stored in contents.tensors.items()
        },
    }


def listing_text(found: dict[str, Any], tensors: bool) -> str:
    """`found`, from `describe_checkpoint`, as a table; with a line for each tensor if `tensors`."""
    kept = ", ".join(map(str, found["steps"]))
    rows = {"step": f"{found['step']} (here: {kept})", "written": found["written"]}
    for values in (found["meta"], found["scalars"]):
        rows |= {printable(key): printable(str(value)) for key, value in values.items()}
    for kind, row in found["kinds"].items():
        rows[kind] = (
            f"{row['tensors']} tensors, {short_number(row['elements'])} elements,"
            f" {decimal(row['bytes'])}"
        )
    rows["files"] = (
        f"{len(found['files'])}, {decimal(sum(found['files'].values()))}, in {found['folder']}"
    )
    lines = [f"{name:<{max(map(len, rows))}}  {value}" for name, value in rows.items()]
    if tensors:
        names = {printable(name): row for name, row in found["tensors"].items()}
        width = max(map(len, names), default=0)
        lines.append("")
        for name, row in names.items():
            parts = "" if row["parts"] == 1 else f", {row['parts']} parts"
            lines.append(f"{name:<{width}}  {row['dtype']} {row['shape']}{parts}")
    return "\n".join(lines)


def _kind(name: str) -> str:
    first, slash, _ = name.partition("/")
    kinds = {"optimizer": "optimizer", "outer": "replicas", "sync": "codecs"}
    return kinds.get(first, "others") if slash else "weights"
