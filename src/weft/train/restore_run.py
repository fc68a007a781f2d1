"""Restores a run from a checkpoint: weights, optimizer state, position in the data."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from weft.checkpoint import load_checkpoint, read_index
from weft.core import CheckpointError
from weft.engine import TrainingEngine

LEFT_OUT, LOSSES = "batches_left_out", "losses"


def restore_engine(engine: TrainingEngine, folder: Path, step: int | None) -> dict[str, Any]:
    """Fill the engine from a checkpoint; returns its scalars. Raises CheckpointError if the
    checkpoint lacks a tensor of the model, or has weights that the model lacks."""
    saved = read_index(folder, step).tensors
    _check_nothing_is_left(engine, saved)
    scalars = load_checkpoint(folder, step, engine.tensors(saved))
    engine.load_scalars(scalars)
    return scalars


def _check_nothing_is_left(engine: TrainingEngine, saved: Iterable[str]) -> None:
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
