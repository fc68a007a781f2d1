"""A validation: means over the validation batches, the same ones each time."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch

from weft.core import RunConfig
from weft.engine import TrainingEngine
from weft.launch import Watchdog

from . import build
from .data import Loader
from .token_rows import refuse_unknown_tokens


@dataclass(frozen=True)
class Validation:
    """Validates one run. `shares`: into how many parts a batch is divided, one after the other."""

    run: RunConfig
    engine: TrainingEngine
    loader: Loader
    watchdog: Watchdog
    shares: int = 1

    def __call__(self, step: int) -> dict[str, float]:
        """`val_loss` after this step: the mean over all that counts in the batches."""
        self.loader.step = 0
        results = []
        batches = min(
            self.run.train.eval_batches * self.shares,
            self.loader.steps_per_epoch,
        )
        for number in range(batches):
            batch = build.cast_batch(self.run, next(self.loader))
            first = self.watchdog.rare() if number == 0 else nullcontext()
            with first, refuse_unknown_tokens(self.engine, batch):
                results.append(self.engine.evaluate(batch))
            self.watchdog.beat(f"batch {number + 1} of the validation after step {step}")
        weights = torch.stack([r.weight for r in results])
        loss = (torch.stack([r.loss for r in results]) * weights).sum() / weights.sum()
        return {"val_loss": float(loss)}
