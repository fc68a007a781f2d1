"""An exponential moving average of the trained weights, sharded as they are."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.core import ConfigError, LocalShard, Plan

from .engine import Engine
from .grad_buckets import local_tensor

PREFIX = "ema/"  # of the names that a checkpoint has


def averaged_name(name: str) -> str:
    """What a checkpoint calls the average of a weight."""
    return PREFIX + name


class WeightAverage:
    """This rank's part of the averages, and an engine with them for checkpoints.

    After each step that was taken, average = d average + (1 - d) weight, where d is `decay`; with
    `warmup` the smaller of `decay` and (1 + n) / (10 + n) after n steps.
    """

    def __init__(self, engine: Engine, decay: float, warmup: bool):
        self.engine, self.model, self.global_plan = engine, engine.model, engine.global_plan
        self.decay, self.warmup = decay, warmup
        self._names = [name for name, p in engine.params.items() if p.requires_grad]
        self._values = {name: self._weight(name).clone() for name in self._names}
        self._fresh: set[str] = set()  # of which the checkpoint that is loaded has no average

    def _weight(self, name: str) -> Tensor:
        return local_tensor(self.engine.params[name].detach())

    @property
    def steps_done(self) -> int:
        return self.engine.steps_done

    @torch.no_grad()
    def update(self) -> None:
        """After a step that was taken."""
        n = self.engine.steps_done
        decay = min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay
        for name, average in self._values.items():
            average.lerp_(self._weight(name), 1 - decay)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The model has the averages for weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, average in self._values.items():
            weight = self._weight(name)
            was = weight.clone()
            weight.copy_(average)
            average.copy_(was)

    # ---- what a checkpoint asks for --------------------------------------------------------------

    def tensors(self, saved: Collection[str] | None = None) -> Iterator[LocalShard]:
        """The engine's, and the averages. `saved`: as of Engine.tensors."""
        yield from self.engine.tensors(saved)
        self._fresh.clear()
        for name, average in self._values.items():
            full = averaged_name(name)
            if saved is not None and full not in saved:
                self._fresh.add(name)
            else:
                yield replace(self.engine.state.shard(name, average, name), name=full)

    def scalars(self) -> dict[str, Any]:
        return self.engine.scalars()

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """An average that the checkpoint lacks begins with the weight."""
        self.engine.load_scalars(scalars)
        for name in self._fresh:
            self._values[name].copy_(self._weight(name))


def check_average(plan: Plan, decay: float, has_workers: bool) -> None:
    """Refuse averages where no rank knows when all weights have taken a step. Raises
    ConfigError."""
    problem = ""
    if has_workers:
        problem = "weights of [workers] live in other processes"
    elif plan.schedule.versions:
        problem = f"{plan.schedule.name} updates each stage by itself, at different times"
    elif plan.replicas_step_independently and plan.sync is not None:
        problem = f"replicas under {plan.sync.name} have weights of their own between exchanges"
    if problem:
        fix = "leave it out, or use allreduce and a synchronous schedule"
        raise ConfigError("train.ema", decay, problem, fix)
