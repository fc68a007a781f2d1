"""`weft verify RUN.toml`: the run's own model, data, loss and optimizer as a Case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from .. import build
from .. import sync as synchronizers
from ..config import Precision, Run, Sync
from ..data import Dataset, Loader
from ..plans import Plan
from ..syncs import EachStep
from .case import Batch, Case
from .parity import LayoutResult
from .prove import verify_case
from .report import Report


def verify_run(run: Run, layouts: Sequence[str], steps: int, done: Callable[[LayoutResult], None]) -> Report:
    """Hold each layout of a run to one device over `steps` optimizer steps, in float64. `done` gets each result."""
    double = run.model_copy(update={"precision": Precision(compute="fp64"), "sync": exact(run.sync)})
    return verify_case(case_of(double), layouts, steps, done)


def exact(sync: Sync) -> Sync:
    """The same synchroniser with gradients as they are, or an all-reduce where replicas step by themselves: what is
    other by design is not to be told from a fault."""
    made = synchronizers.make(sync.name, sync.codec, **sync.arguments)
    return sync.model_copy(update={"codec": "identity"}) if isinstance(made, EachStep) else Sync()


def case_of(run: Run) -> Case:
    """The Case of a run. Recomputation, accumulation and clipping are the run's own."""
    batches = _Batches(run)
    return Case(
        build=partial(build.model, run, dtype=torch.float64),
        plan=partial(_plan, run, batches),
        batch=batches,
        loss=build.loss(run),
        optimizer=build.optimizer(run),
        inputs=run.model.inputs,
        clip=run.train.clip,
        seed=run.train.seed,
        workers=run.workers,
    )


def _plan(run: Run, batches: _Batches, model: nn.Module, layout: str) -> Plan:
    return build.plan(build.with_layout(run, layout), model, build.first(run, batches.held()))


@dataclass
class _Batches:
    """The batches that training would take, from the loader that training uses."""

    run: Run
    dataset: Dataset | None = field(default=None, repr=False)

    def held(self) -> Dataset:
        if self.dataset is None:
            self.dataset = build.dataset(self.run)
        return self.dataset

    def __call__(self, step: int, data_rank: int, data_size: int) -> Batch:
        train = self.run.train
        loader = partial(Loader, self.held(), train.batch, train.seed, accumulate=train.accumulate)
        return next(loader(data_rank=data_rank, data_size=data_size, start=step))
