"""Restores a run from a checkpoint: weights, optimizer state, position in the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.checkpoint import load_checkpoint, read_index
from weft.engine import TrainingEngine

LEFT_OUT, LOSSES = "batches_left_out", "losses"


def restore_engine(engine: TrainingEngine, folder: Path, step: int | None) -> dict[str, Any]:
    """Fill the engine from a checkpoint; returns its scalars."""
    saved = read_index(folder, step).tensors
    scalars = load_checkpoint(folder, step, engine.tensors(saved))
    engine.load_scalars(scalars)
    return scalars
