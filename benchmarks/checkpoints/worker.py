"""What is measured in a process: the pause of a save beside training, and files written and
read."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from weft import checkpoint
from weft.checkpoint import AsyncCheckpointer, Retention
from weft.core.shards import LocalShard, whole_shard

REPEATS = 7


def state(nbytes: int) -> dict[str, Tensor]:
    """As of a model of so many bytes with the two moments of Adam: matrices of 16 MB."""
    rows = 2**22 // 2048
    return {f"layers.{i}.weight": torch.randn(rows, 2048) for i in range(max(1, nbytes // 2**24))}


def pause(nbytes: int) -> dict[str, Any]:
    """Seconds for which training stops at a save, beside a plain copy of the same bytes, in
    turn."""
    torch.set_num_threads(1)
    tensors = state(nbytes)
    pieces = [whole_shard(name, tensor) for name, tensor in tensors.items()]
    copies = [torch.empty_like(tensor) for tensor in tensors.values()]
    folder, saver, found = Path("pause.tmp"), AsyncCheckpointer(), {"pause": [], "copy": []}
    for step in range(REPEATS + 1):  # the first one makes the buffers

        def copied() -> None:
            for copy, tensor in zip(copies, tensors.values(), strict=True):
                copy.copy_(tensor)

        saver.wait()
        found["pause"].append(
            _seconds(lambda step=step: saver.save(folder, step, pieces, {}, {}, Retention(1)))
        )
        saver.wait()
        found["copy"].append(_seconds(copied))
    shutil.rmtree(folder)
    return {name: median(each[1:]) for name, each in found.items()} | {"first": found["pause"][0]}


def files(nbytes: int) -> dict[str, Any]:
    """Seconds until files are on disk, and until tensors are read from them, of each way in
    turn."""
    torch.set_num_threads(1)
    tensors = state(nbytes)
    pieces = [whole_shard(name, tensor) for name, tensor in tensors.items()]
    into = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    targets: list[LocalShard] = [whole_shard(name, tensor) for name, tensor in into.items()]
    found: dict[str, list[float]] = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        found.setdefault(name, []).append(_seconds(call))

    def saved() -> None:
        with open("torch.tmp", "wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())

    for step in range(REPEATS):
        note(
            "weft save",
            lambda step=step: checkpoint.save_checkpoint(
                Path("weft.tmp"), step, pieces, {}, {}, Retention(1)
            ),
        )
        note("torch save", saved)
        note("dcp save", lambda: dcp.save(tensors, checkpoint_id="dcp.tmp", no_dist=True))
        note("weft load", lambda: checkpoint.load_checkpoint(Path("weft.tmp"), None, targets))
        note("torch load", lambda: torch.load("torch.tmp", weights_only=True))
        note("dcp load", lambda: dcp.load(into, checkpoint_id="dcp.tmp", no_dist=True))
    os.remove("torch.tmp")
    shutil.rmtree("weft.tmp")
    shutil.rmtree("dcp.tmp")
    return {name: median(each) for name, each in found.items()}


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
