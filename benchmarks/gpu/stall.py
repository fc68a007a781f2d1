"""How long a save in the background holds up training, beside a plain copy of the same bytes to
the host."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from ours import Ours
from setting import ONE, Setting, Size

from weft.checkpoint import AsyncCheckpointer, Retention

SAVED = replace(ONE, name="1B's width", layers=4)
SAVES, WARMUP, STEPS = 2, 4, 8


def saves(setting: Setting, size: Size, folder: str) -> dict[str, Any]:
    """A rank's seconds: of a step, of `save` itself, of each step until the files are there, and
    of a copy."""
    setting.fresh()
    trainer, saver, found = Ours(setting, size, setting.compiled()), AsyncCheckpointer(), []
    for _ in range(WARMUP):
        trainer.step()
    quiet = [setting.seconds(trainer.step) for _ in range(2 if setting.small else STEPS)]
    engine = trainer.engine
    pieces = [piece.tensor for piece in engine.tensors() if piece.writer and piece.chunks]
    cuda = not setting.small
    copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=cuda) for t in pieces]

    def copied() -> None:
        for copy, tensor in zip(copies, pieces, strict=True):
            copy.copy_(tensor, non_blocking=True)

    plain = [setting.seconds(copied) for _ in range(SAVES)]
    copies.clear()  # their memory
    for number in range(SAVES):

        def save(number: int = number) -> None:
            given = (engine.tensors(), engine.scalars(), {}, Retention(1))
            saver.save(Path(folder), number, *given)

        began = time.perf_counter()
        call_s, beside = setting.seconds(save), list[float]()
        while together(saver):
            beside.append(setting.seconds(trainer.step))
        files_s = time.perf_counter() - began
        saver.wait()
        found.append({"call_s": call_s, "steps_s": beside, "files_s": files_s})
    nbytes = sum(tensor.nbytes for tensor in pieces)
    return {"quiet_s": quiet, "copy_s": median(plain), "bytes": nbytes, "saves": found}


def together(saver: AsyncCheckpointer) -> bool:
    """Whether any rank still writes: all take equally many steps."""
    thread = saver._thread
    writes = torch.tensor(float(thread is not None and thread.is_alive()))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, bool(writes))
    return any(everyone)


def measure(setting: Setting) -> list[dict[str, Any]]:
    size = setting.sized(SAVED)
    with tempfile.TemporaryDirectory() as folder, setting.pool() as pool:
        ranks = pool.run(saves, setting, size, folder, timeout=1200)
    step_s = median(max(times) for times in zip(*(rank["quiet_s"] for rank in ranks)))
    rows = []
    for number in range(SAVES):
        each = [rank["saves"][number] for rank in ranks]
        call_s = max(one["call_s"] for one in each)
        beside = [max(times) for times in zip(*(one["steps_s"] for one in each))]
        rows.append(
            {
                "size": vars(size),
                "save": number,
                "bytes": max(rank["bytes"] for rank in ranks),
                "step_s": step_s,
                "copy_s": max(rank["copy_s"] for rank in ranks),
                "call_s": call_s,
                "steps_beside": len(beside),
                "beside_s": median(beside) if beside else None,
                # of the call, and what the steps beside the writing lose
                "held_up_s": call_s + sum(took - step_s for took in beside),
                "files_s": max(one["files_s"] for one in each),
            }
        )
        print(rows[-1], flush=True)
    return rows


def passed(row: dict[str, Any]) -> bool:
    return True


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| save | GB a rank | step, s | call, s | copy alone, s | call / copy | held up, steps |"
        " files there after, s | step beside / step |"
    ]
    lines += ["| --- |" + " ---: |" * 8]
    for row in rows:
        name = f"{row['save'] + 1}" + (", makes the buffers" if row["save"] == 0 else "")
        beside = "-" if row["beside_s"] is None else f"{row['beside_s'] / row['step_s']:.2f}"
        lines.append(
            f"| {name} | {row['bytes'] / 1e9:.2f} | {row['step_s']:.3f} | {row['call_s']:.3f} |"
            f" {row['copy_s']:.3f} | {row['call_s'] / row['copy_s']:.2f} |"
            f" {row['held_up_s'] / row['step_s']:.2f} | {row['files_s']:.1f} | {beside} |"
        )
    return lines
