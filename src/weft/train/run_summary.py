"""The first and the last record of a run: its configuration and its result."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from datetime import timedelta
from shlex import quote
from statistics import median

import torch
from rich.filesize import decimal

from weft.core import RunConfig, short_number
from weft.engine import Engine, TrainingEngine
from weft.launch import AGENT

from .metrics import highest_over_ranks, peak_memory_bytes
from .train_loop import Compare, TrainLoop


def run_header(
    run: RunConfig, engine: TrainingEngine, done: int, notes: Sequence[str]
) -> dict[str, str]:
    layout, count = (
        engine.global_plan.layout,
        sum(math.prod(weight.shape) for weight in engine.plan.weights),
    )
    device = engine.mesh.device
    kind = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    rows = {
        "layout": f"{layout}, {run.world} {'process' if run.world == 1 else 'processes'}",
        "model": f"{short_number(count)} parameters, {run.precision.compute}",
        "device": f"{kind} each" if run.world > 1 else kind,
        "folder": run.output,
    }
    rows |= {"note" if i == 0 else f"note {i + 1}": note for i, note in enumerate(notes)}
    return rows | ({"resumed": f"after step {done}"} if done else {})


def run_summary(
    run: RunConfig,
    loop: TrainLoop,
    interrupted: bool,
    total_s: float,
    speaks: bool,
    compare: Compare | None,
) -> dict[str, str]:
    engine, (name, count) = loop.engine, loop.counted
    rows = {"steps": f"{engine.steps_done}/{run.train.steps}"}
    if interrupted:
        again = (
            "it continues when the hosts meet again"
            if os.environ.get(AGENT) == "elastic"
            else "--resume goes on"
        )
        rows["stopped"] = f"saved after step {engine.steps_done}; {again}"
    elif why := loop.callbacks.run.stop_reason:
        rows["stopped"] = why
    if loop.loss is not None:
        rows["loss"] = f"{loop.loss:.4f}"
    if loop.val_loss is not None:
        rows["validation"] = f"{loop.val_loss:.4f}"
    if loop.best.step is not None:
        rows["best"] = f"{loop.best.loss:.4f} after step {loop.best.step}, whose checkpoint is kept"
    if loop.skipped:
        counts = loop.skipped.items()
        rows["skipped"] = "; ".join(
            f"{n} {'step' if n == 1 else 'steps'}, {why}" for why, n in counts
        )
    # the first step has a line of its own, and its time is that of setting up and compiling
    pace_s = median(loop.paces[1:] or loop.paces or [0.0])
    if pace_s:
        which = "median without the first step" if len(loop.paces) > 1 else "of the first step"
        rows["speed"] = f"{short_number(count / pace_s)} {name}/s ({which})"
    if wire := loop.traffic.summary():
        rows["sent"] = wire
    if slow := loop.own.summary():
        rows["slow"] = slow
    if engine.global_plan.layout.stage_ranks > 1 and loop.idle_s:
        rows["idle"] = f"{loop.idle_s / loop.clock.total_s:.0%} of a step, waiting for other stages"
    if loop.reading.total_s >= 0.01 * loop.clock.total_s > 0:
        share = loop.reading.total_s / loop.clock.total_s
        hint = "" if run.data.workers else ": data.workers would make batches meanwhile"
        rows["data"] = f"{share:.0%} of a step, waiting for batches{hint}"
    if isinstance(engine, Engine) and engine.compiled:
        rows["compiled"] = str(engine.compiled.counts)
    if experts := loop.gates.summary():
        rows["experts"] = experts
    if engine.replicas.stalest is not None:
        rows["staleness"] = f"{engine.replicas.stalest} steps at most"
    rows |= {
        "time": str(timedelta(seconds=round(total_s))),
        "memory": (
            f"{decimal(highest_over_ranks(peak_memory_bytes(engine.mesh.device)))} at most on a"
            " rank"
        ),
    }
    if compare and speaks and not interrupted and isinstance(engine, Engine) and pace_s:
        rows |= compare(run, engine.mesh.device, pace_s)
    return rows | {"folder": run.output, "report": f"weft report {quote(run.output)}"}
