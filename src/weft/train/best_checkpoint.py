"""The checkpoint of the lowest validation loss, which `checkpoint.keep_best` saves and keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.checkpoint import CHECKPOINTS, read_index
from weft.core import CheckpointError, ConfigError

BEST = "best"  # scalar of a checkpoint: [step, validation loss]


@dataclass
class BestCheckpoint:
    """Which step's it is. Every rank has the same validation losses, and so the same one."""

    wanted: bool
    step: int | None = None
    loss: float = math.inf

    def improves(self, step: int, loss: float) -> bool:
        """Whether this step's checkpoint is the best so far, and to be saved."""
        if not self.wanted or loss >= self.loss:
            return False
        self.step, self.loss = step, loss
        return True

    def steps(self) -> tuple[int, ...]:
        """Steps whose checkpoints stay for it."""
        return () if self.step is None else (self.step,)

    def scalars(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {} if self.step is None else {BEST: [self.step, self.loss]}

    def restore(self, scalars: Mapping[str, Any]) -> None:
        """Take over what a checkpoint has of it. Raises CheckpointError."""
        self.step, self.loss = None, math.inf
        if self.wanted and (found := _read(scalars)) is not None:
            self.step, self.loss = found


def best_step(folder: Path) -> int:
    """The step of the best checkpoint of a run folder. Raises ConfigError, CheckpointError."""
    found = _read(read_index(folder / CHECKPOINTS).scalars)
    if found is None:
        problem = f"the run in {folder} kept no best checkpoint"
        raise ConfigError("--step", BEST, problem, "name a step, or train with keep_best = true")
    return found[0]


def _read(scalars: Mapping[str, Any]) -> tuple[int, float] | None:
    match scalars.get(BEST):
        case None:
            return None
        case [int(step), float(loss)] if step >= 0 and not isinstance(step, bool):
            return step, loss
    problem = "is not a step with its validation loss"
    raise CheckpointError(BEST, scalars[BEST], problem, "use a checkpoint that weft saved")
