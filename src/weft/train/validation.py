"""A validation: means over the validation batches, the same ones each time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.core import RunConfig
from weft.engine import Loss, TrainingEngine, WeightAverage
from weft.launch import Watchdog

from . import build_data
from .stream_loader import AnyLoader
from .token_rows import refuse_unknown_tokens


@dataclass(frozen=True)
class Validation:
    """Validates one run. `shares`: into how many parts a batch is divided, one after the other.
    `average`: the weights that are used; None: those that are trained."""

    run: RunConfig
    engine: TrainingEngine
    loader: AnyLoader
    watchdog: Watchdog
    shares: int = 1
    metrics: Mapping[str, Loss] = field(default_factory=dict)
    average: WeightAverage | None = None

    def __call__(self, step: int) -> dict[str, float]:
        """`val_loss` after this step, and `val_NAME` of each metric: means over all that counts in
        the batches."""
        results = []
        for number, batch in enumerate(self._batches()):
            first = self.watchdog.rare() if number == 0 else nullcontext()
            averaged = self.average.in_use() if self.average is not None else nullcontext()
            with first, averaged, refuse_unknown_tokens(self.engine, batch):
                results.append(self.engine.evaluate(batch, self.metrics))
            self.watchdog.beat(f"batch {number + 1} of the validation after step {step}")
        weights = torch.stack([r.weight for r in results])
        loss = (torch.stack([r.loss for r in results]) * weights).sum() / weights.sum()
        line = {"val_loss": float(loss)}
        for name in self.metrics:
            total, weight = torch.stack([r.metrics[name] for r in results]).sum(0)
            mean = float(total / weight)
            if math.isfinite(mean):  # what never counts has no mean
                line[f"val_{name}"] = mean
        return line

    def _batches(self) -> Iterator[dict[str, Tensor]]:
        batches = self.loader.one_pass(self.run.train.eval_batches * self.shares)
        while True:
            with self.watchdog.rare():  # of a stream, a whole block may be read for a batch
                batch = next(batches, None)
            if batch is None:
                return
            yield build_data.cast_batch(self.run, batch)
