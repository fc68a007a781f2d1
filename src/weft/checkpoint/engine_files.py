"""Saves and loads what an engine holds, in the folder of a run: the same files as `weft train`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from weft.core import CheckpointError, LocalShard, Plan, __version__

from .index import CHECKPOINTS, CheckpointIndex, read_index
from .reader import load_checkpoint
from .writer import Retention, save_checkpoint

_ANOTHER = "resume from another checkpoint, which weft saved"


class Saved(Protocol):
    """What a checkpoint needs of an engine."""

    model: nn.Module
    global_plan: Plan

    @property
    def steps_done(self) -> int: ...
    def tensors(self, saved: Collection[str] | None = None) -> Iterable[LocalShard]: ...
    def scalars(self) -> dict[str, Any]: ...
    def load_scalars(self, scalars: dict[str, Any]) -> None: ...


def order_scalars(batch: int, seed: int) -> dict[str, int]:
    """What the order of samples depends on beside the number of steps done."""
    return {"batch": batch, "seed": seed}


def save(engine: Saved, folder: str | Path, *, keep: int = 3, seed: int = 0) -> None:
    """Save a checkpoint after the engine's latest step, to `folder/checkpoints`: weights, buffers,
    optimizer state and the number of steps. Returns when it is on disk. All ranks call it together.

    Args:
        engine: a weft.Engine.
        folder: a run folder, which all ranks see. `weft checkpoint show` lists what it holds.
        keep: how many checkpoints stay, with this one.
        seed: seed of the data's order; `weft train --resume` refuses another `train.seed`.

    Raises:
        CheckpointError: on every rank, if a rank cannot write; older checkpoints stay. Or replicas
            step independently: `weft train` saves those.

    Example:
        for batch in loader:
            engine.step(engine.local(batch))
            if engine.steps_done % 500 == 0:
                weft.checkpoint.save(engine, "runs/mine")
    """
    plan = engine.global_plan
    if plan.replicas_step_independently:
        problem, fix = (
            "its replicas are at different steps",
            "train with weft train, which saves each replica",
        )
        raise CheckpointError("sync.name", plan.sync and plan.sync.name, problem, fix)
    scalars = {**order_scalars(plan.batch, seed), **engine.scalars()}
    made = Path(folder) / CHECKPOINTS, engine.steps_done, engine.tensors(), scalars
    save_checkpoint(*made, describe_origin(plan), Retention(keep))


def describe_origin(plan: Plan) -> dict[str, str]:
    """What a checkpoint says for people and tools about what wrote it."""
    return {"layout": str(plan.layout), "weft": __version__, "torch": torch.__version__}


def load(engine: Saved, folder: str | Path, step: int | None = None) -> dict[str, Any]:
    """Fill an engine, of any layout, from a checkpoint that `save` or `weft train` wrote;
    `engine.steps_done` is then its step. All ranks call it together.

    Args:
        engine: a weft.Engine of the model that was saved.
        folder: the run folder.
        step: the step of the checkpoint. Default: the latest.

    Returns:
        The scalars that were saved beside the tensors.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, lacks a tensor of the model, or has
            weights that the model lacks. No weight is then changed.

    Example:
        weft.checkpoint.load(engine, "runs/mine")
        loader.step = engine.steps_done
    """
    return fill_engine(engine, Path(folder) / CHECKPOINTS, step)


def fill_engine(engine: Saved, folder: Path, step: int | None) -> dict[str, Any]:
    """`load` from the folder that holds the checkpoints themselves."""
    contents = read_index(folder, step)
    _check_steps(contents, folder)
    saved = contents.tensors
    _check_nothing_is_left(engine, saved)
    scalars = load_checkpoint(folder, contents.step, engine.tensors(saved))
    try:
        engine.load_scalars(scalars)
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        problem = f"its scalars are not those of an engine ({type(error).__name__}: {error})"
        raise CheckpointError("checkpoint", str(folder), problem, _ANOTHER) from error
    return scalars


def _check_steps(contents: CheckpointIndex, folder: Path) -> None:
    """Refuse a checkpoint whose engine had taken other steps than it is called by."""
    done = contents.scalars.get("steps_done")
    if type(done) is not int or done != contents.step:
        problem = f"the checkpoint of step {contents.step} has steps_done = {done!r}"
        raise CheckpointError("checkpoint", str(folder), problem, _ANOTHER)


def _check_nothing_is_left(engine: Saved, saved: Iterable[str]) -> None:
    """Refuse a checkpoint of a larger model: what is left of it would be gone in silence."""
    weights = engine.global_plan.weights
    known = {name for weight in weights for name in (weight.name, *weight.aliases)}
    known |= {name for name, _ in engine.model.named_buffers()}
    left = [name for name in saved if "/" not in name and name not in known]
    if left:
        more = f" and {len(left) - 1} others" if len(left) > 1 else ""
        problem = f"the checkpoint has it{more}, and the model does not"
        fix = "resume with the model that was saved, or begin another run"
        raise CheckpointError("tensor", left[0], problem, fix)
