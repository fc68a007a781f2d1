"""A short run of `weft train`, and what it has written."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from weft.checkpoint import CHECKPOINTS, CheckpointReader, checkpoint_path, read_index, saved_steps
from weft.core import DRIVER, METRICS, Refusal, RunConfig, WeftError, WorkerDied
from weft.engine import AsyncServerReplicas, Float64Mode, Remote, UpdateOrder
from weft.launch import run_replicas, run_workers
from weft.train import build_sync, replica_ranks, train

from .plain.experts import tokens_by_expert

KEYS = ("lr", "loss", "grad_norm", "skipped", "batches_left_out")
OF_EXPERTS = ("busiest_expert", "dropped_share", "gate_loss")  # compared where one device has them


@dataclass(frozen=True)
class TrainedRun:
    """What a run has written: per step its numbers that one device has too, and its last
    checkpoint. `orders`: what each rank's parameter server did; empty where it has none. `saved`:
    of which steps there are checkpoints."""

    lines: dict[int, dict[str, float]]
    tensors: dict[str, Tensor]
    scalars: dict[str, Any]
    orders: list[UpdateOrder]
    saved: tuple[int, ...] = ()


def train_in(
    run: RunConfig, folder: Path, begin: Path | None = None, step: int | None = None
) -> TrainedRun | str:
    """Train in `folder`; from the checkpoint of this step of the run in `begin`, if that is given.
    Default: its first one. What went wrong, in its place.

    Raises:
        WeftError: a signal has stopped the run.
    """
    step = step or run.checkpoint.every
    if begin is not None:
        # the first replica's is the run's; where they are apart, each other one has its own, unless
        # servers have the weights
        others = range(1, 0 if build_sync(run).asynchronous else len(replica_ranks(run)))
        for kept in ("", *(f"replica-{number}" for number in others)):
            saved = checkpoint_path(begin / CHECKPOINTS / kept, step)
            if not saved.exists():
                whose = f" of {kept}" if kept else ""
                return f"has no checkpoint{whose} of step {step}"
            shutil.copytree(saved, folder / saved.relative_to(begin))
    try:
        ended = _run_ranks(
            run, _quietly, run.model_copy(update={"output": str(folder)}), bool(begin)
        )
    except Refusal as error:
        return f"is refused: {error}"
    except WorkerDied as error:
        if error.stopped:
            raise
        return f"does not run: {error.report.strip().splitlines()[-1]} (rank {error.rank})"
    if any(left for _, left in ended):
        raise WeftError("stopped by a signal: the rest is not verified")
    lines, seen = dict[int, dict[str, float]](), set[tuple[int, bool]]()
    for text in (folder / METRICS).read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        of = line["step"], "val_loss" in line
        if of in seen:
            return f"{METRICS} has two lines of {'the validation after ' * of[1]}step {of[0]}"
        seen.add(of)
        lines.setdefault(line["step"], {}).update(_numbers_of(line))
    contents = read_index(folder / CHECKPOINTS)
    with CheckpointReader(checkpoint_path(folder / CHECKPOINTS, contents.step), contents) as reader:
        tensors = {name: reader.read_tensor(name) for name in contents.tensors}
    steps = tuple(saved_steps(folder / CHECKPOINTS))
    return TrainedRun(lines, tensors, contents.scalars, [order for order, _ in ended], steps)


def _numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Those of a line of metrics.jsonl that one device has too."""
    kept = {k: v for k, v in line.items() if k in (*KEYS, *OF_EXPERTS) or k.startswith("val_")}
    return kept | tokens_by_expert(line.get("tokens_per_expert", {}))


def _run_ranks(run: RunConfig, function: Callable[..., Any], *args: Any) -> list[Any]:
    """In the processes that `weft train` would start; what each returns. Raises WorkerDied."""
    replicas = replica_ranks(run)
    if replicas:
        return run_replicas(function, replicas, *args, all_needed=True)
    return run_workers(
        function, run.world, *args, names=(DRIVER, *run.workers) if run.workers else ()
    )


def _quietly(run: RunConfig, resume: bool) -> tuple[UpdateOrder, bool]:
    """What a parameter server of this process did, if it has one; and whether a signal has stopped
    the run before its last step."""
    order: UpdateOrder = []
    exact = run.precision.compute == "fp64"
    AsyncServerReplicas.order = order  # of the engine that this process makes
    Remote.around = (Float64Mode,) if exact else ()  # workers answer calls in other threads
    said = io.StringIO()
    mode = Float64Mode() if exact else contextlib.nullcontext()
    with mode, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        left = train(run, resume)
    return order, left
