"""The run folder:

    run.toml  plan.txt  metrics.jsonl  sample.txt  checkpoints/
    tensorboard/  metrics.csv  wandb/  (of loggers)  profile.json  memory-RANK.pickle

and whether a run may write into it. Asked before any process starts, so nothing here takes part in
a process group.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.checkpoint import (
    CHECKPOINTS,
    CheckpointIndex,
    latest_step,
    order_scalars,
    read_index,
)
from weft.core import METRICS, CheckpointError, ConfigError, DataError, RunConfig

from .stream_loader import read_position

TENSORBOARD = "tensorboard"
CSV = "metrics.csv"
SAMPLE = "sample.txt"

# scalars of a checkpoint
LEFT_OUT, LOSSES, DATA, SAMPLES = "batches_left_out", "losses", "data", "samples"
GROUPED = "group_by_length"
OPTIMIZER = "optimizer"
_ANOTHER = "resume from another checkpoint, which weft saved"


def check_output(run: RunConfig, resume: bool) -> None:
    """The run folder can be written to; it holds no other run, or, to resume, a checkpoint of this
    one.

    Makes the folder. Raises ConfigError, CheckpointError.
    """
    folder = Path(run.output)
    if resume:
        _check_resume(run, read_index(folder / CHECKPOINTS))
    else:
        step = latest_step(folder / CHECKPOINTS)
        if step is not None:
            fix = f"go on from step {step} with --resume, or name another folder with --output"
            raise ConfigError("output", run.output, "holds the checkpoints of a run", fix)
        if os.path.lexists(folder / METRICS):
            raise ConfigError(
                "output",
                run.output,
                "holds the metrics of a run",
                "name another folder with --output",
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        fix = "name another folder with --output"
        raise ConfigError(
            "output", run.output, f"cannot be written to ({error.strerror})", fix
        ) from None


def checkpoint_folder(run: RunConfig, replica: int | None = None) -> Path:
    """Where checkpoints are: those of the run, or what one of several replicas that step by
    themselves keeps beside them."""
    folder = Path(run.output) / CHECKPOINTS
    return folder if replica is None else folder / f"replica-{replica}"


def resume_folder(run: RunConfig, replica: int) -> Path:
    """Where a replica finds what it goes on from: its own checkpoint, if it is of the run's latest
    step."""
    whole, own = checkpoint_folder(run), checkpoint_folder(run, replica)
    return own if latest_step(own) == latest_step(whole) is not None else whole


def replicas_without_checkpoint(run: RunConfig, replicas: int) -> list[int]:
    """Those of so many replicas that step by themselves which have no checkpoint of the run's
    latest step, beside the one that wrote the run's."""
    latest = latest_step(checkpoint_folder(run))
    own = [latest_step(checkpoint_folder(run, replica)) for replica in range(replicas)]
    return [replica for replica, step in enumerate(own) if step != latest][1:]


def loop_state(scalars: Mapping[str, Any]) -> tuple[int, list[float]]:
    """Of a checkpoint's scalars: how many batches are left out for good, and the losses that were
    last seen. Raises CheckpointError."""
    left_out, losses = scalars.get(LEFT_OUT, 0), scalars.get(LOSSES, [])
    if type(left_out) is not int or left_out < 0:
        raise CheckpointError(LEFT_OUT, left_out, "is not a number of batches", _ANOTHER)
    if not isinstance(losses, list) or not all(type(loss) in (int, float) for loss in losses):
        raise CheckpointError(LOSSES, losses, "is not a list of losses", _ANOTHER)
    return left_out, losses


def _check_resume(run: RunConfig, contents: CheckpointIndex) -> None:
    """Where a run stands in its data is its number of steps, which another batch or seed would give
    another meaning."""
    for key, value in data_position(run).items():
        was = contents.scalars.get(key, 0 if key == GROUPED else None)
        if was != value:
            problem = (
                f"the run in {run.output} has {key} {was}, and its order of samples depends on that"
            )
            field = f"data.{key}" if key == GROUPED else f"train.{key}"
            raise ConfigError(
                field, value, problem, f"resume with {key} {was}, or begin another run"
            )
    _check_optimizer(run, contents.scalars.get(OPTIMIZER))
    loop_state(contents.scalars)
    if DATA in contents.scalars:
        read_position(contents.scalars[DATA], run.data.shuffle_buffer)
    if contents.step > run.train.steps:
        problem = f"the run in {run.output} has taken {contents.step} steps"
        raise ConfigError(
            "train.steps", run.train.steps, problem, f"resume with at least {contents.step}"
        )


def optimizer_name(run: RunConfig) -> str:
    """What the run file calls its optimizer."""
    return str(run.optimizer.build or run.optimizer.name)


def _check_optimizer(run: RunConfig, was: object) -> None:
    """Refuse state of another optimizer. A function of the user's own may have been renamed: what
    it keeps is compared where it is loaded. `was`: None where a checkpoint does not say it."""
    now = optimizer_name(run)
    if was in (None, now) or (":" in str(was) and ":" in now):
        return
    fix = f'resume with "{was}", or begin another run'
    if run.model.hf is not None:
        fix += "; weft checkpoint export writes these weights, which [model] hf then names"
    field = "optimizer.build" if run.optimizer.build else "optimizer.name"
    problem = f"the checkpoint in {run.output} holds the state of {was}"
    raise ConfigError(field, now, problem, fix)


def data_position(run: RunConfig, samples: int | None = None) -> dict[str, int]:
    """What the run's order of samples depends on beside the number of steps done. `samples`: of a
    map-style dataset."""
    held = {} if samples is None else {SAMPLES: samples}
    order = order_scalars(run.train.batch, run.train.seed)
    return order | {GROUPED: run.data.group_by_length} | held


def refuse_other_data(scalars: Mapping[str, Any], samples: int | None) -> None:
    """Refuse to go on with a dataset of another size than the checkpoint's: its order of samples is
    another. Raises DataError."""
    before = scalars.get(SAMPLES, samples)
    if samples is not None and before != samples:
        problem = f"has {samples} samples, and had {before} when the run was saved"
        fix = "resume with the same data, or begin another run"
        raise DataError("data", f"{samples} samples", problem, fix)
