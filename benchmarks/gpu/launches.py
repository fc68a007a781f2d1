"""How many kernels the host launches in a step, and whether blocks run as CUDA graphs: a decoder
of few layers and tokens, where launches are what a step waits for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from statistics import median
from typing import Any

from ours import Ours
from plain import Plain
from setting import ONE, Setting, Size
from torch.profiler import ProfilerActivity, profile

from weft.core import Refusal, WorkerDied

FEW = replace(ONE, name="1B's width", layers=4, seq_len=512, batch=1)
SIDES = ("plain", "plain compiled", "weft", "weft compiled", "weft graphs")
WARMUP, STEPS = 5, 10
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")  # and Ex, ExC


def counted(setting: Setting, size: Size, side: str) -> dict[str, Any]:
    """A rank's launches in one step, and the seconds of some."""
    setting.fresh()
    if side.startswith("plain"):
        trainer: Any = Plain(setting, size, compiled=side.endswith("compiled"))
    else:
        how: Any = "off" if side == "weft" else setting.compiled()
        if side == "weft graphs":
            how = setting.compiled("reduce-overhead")
        trainer = Ours(setting, size, how)
    rows = {k: v[: size.batch].clone() for k, v in size.rows(1, setting.device).items()}
    for _ in range(WARMUP):
        trainer.step(rows)
    count = 2 if setting.small else STEPS
    times = [setting.seconds(lambda: trainer.step(rows)) for _ in range(count)]
    kinds = [ProfilerActivity.CPU] + ([] if setting.small else [ProfilerActivity.CUDA])
    with profile(activities=kinds) as seen:
        trainer.step(rows)
        setting.wait()
    events = Counter({event.key: event.count for event in seen.key_averages()})
    return {
        "step_s": median(times),
        "launches": sum(n for key, n in events.items() if key.startswith(LAUNCHES)),
        "graphs": events["cudaGraphLaunch"],
        "copies": sum(n for key, n in events.items() if key.startswith("cudaMemcpy")),
        "waits": sum(n for key, n in events.items() if key.endswith("Synchronize")),
        "operators": sum(n for key, n in events.items() if key.startswith("aten::")),
    }


def measure(setting: Setting) -> list[dict[str, Any]]:
    rows = []
    size = setting.sized(FEW)
    with setting.pool() as pool:
        for side in SIDES[::4] if setting.small else SIDES:
            row: dict[str, Any] = {"size": vars(size), "side": side}
            try:
                ranks = pool.run(counted, setting, size, side, timeout=600)
            except (Refusal, WorkerDied) as problem:
                row["failure"] = str(problem)
            else:
                row |= ranks[0] | {"step_s": max(rank["step_s"] for rank in ranks)}
            rows.append(row)
            print(row, flush=True)
    return rows


def passed(row: dict[str, Any]) -> bool:
    return "failure" not in row


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| step of | kernels launched | graphs | copies | waits | operators | ms |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    names = ("launches", "graphs", "copies", "waits", "operators")
    for row in rows:
        if not passed(row):
            lines.append(f"| {row['side']} | **failed** | | | | | |")
            continue
        figures = " | ".join(str(row[name]) for name in names)
        lines.append(f"| {row['side']} | {figures} | {1e3 * row['step_s']:.1f} |")
    return lines
