"""`weft verify RUN.toml`: the run's own model, data, loss and optimizer as a Case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.core import OFF, Plan, Refusal, RunConfig, emulate_float8
from weft.engine import Loss, OptimizerFactory
from weft.train import (
    AnyLoader,
    Dataset,
    Stream,
    StreamLoader,
    build_collate,
    build_dataset,
    build_deferred,
    build_eval_metrics,
    build_loss,
    build_model,
    build_optimizer,
    build_plan,
    build_sync,
    make_loader,
    on_own_layout,
    resolve_callable,
    sample_batch,
    shuffled_places,
    with_layout,
)

from .case import Batch, Case, mode_of
from .difference import SGD_LR
from .layout_result import LayoutResult
from .plain.given_options import option_faults
from .plain.models import plain_model
from .plain.parameter_groups import factory_faults
from .plain.samples import (
    grouping_faults,
    lengths_of,
    order_faults,
    place_faults,
    streamed_batch_of,
    whole_batch_of,
)
from .report import VerifyReport
from .training_check import TrainingResult, verify_training
from .verified_settings import deep_precision, deep_sync, on_cpus, verified_precision, verified_sync
from .verify_model import verify_case


def verify_layouts(
    run: RunConfig,
    layouts: Sequence[str],
    steps: int,
    done: Callable[[LayoutResult], None],
    precision: str = "fp64",
    refused: Mapping[str, Refusal] | None = None,
) -> VerifyReport:
    """Compare each layout of a run with one device.

    Args:
        run: the run; its model, data, loss and optimizer are used.
        layouts: the layouts to compare.
        steps: optimizer steps of each.
        done: gets each result when it is there.
        precision: "fp64", or "bf16", "fp16" and "float8": what a rounding may change is allowed,
            and the optimizer is SGD, which makes no whole step of the sign of a gradient that is
            near zero.
            Linears multiply in float8 with "float8" alone, by emulation.
        refused: those of the layouts that cannot be planned, and why.
    """
    table = verified_precision(run.precision, precision)
    update = {"precision": table, "sync": verified_sync(run.sync, precision)}
    case = make_case(on_cpus(run).model_copy(update=update))
    return verify_case(case, layouts, steps, done, refused)


def verify_deep(
    run: RunConfig, layouts: Sequence[str], done: Callable[[TrainingResult], None]
) -> list[TrainingResult]:
    """Hold what `weft train` does of a run under each layout, in float64, to one device's
    definition; and in the run's own precision, to its own resuming. `done` gets each result when it
    is there."""
    return verify_training(*deep_case(run), layouts, done, deep_precision(run.precision))


def deep_case(
    run: RunConfig,
) -> tuple[RunConfig, Case, Callable[[int], list[Batch]], Mapping[str, Loss]]:
    """The run in float64, its Case, the whole batches of a validation of at most so many, and what
    it measures."""
    table = verified_precision(run.precision, "fp64")
    exact = on_cpus(run).model_copy(update={"precision": table, "sync": deep_sync(run.sync)})
    return exact, make_case(exact), _Batches(exact, "val").of_one_pass, build_eval_metrics(exact)


def make_case(run: RunConfig) -> Case:
    """The Case of a run. Recomputation, accumulation and clipping are the run's own."""
    batches, low = _Batches(run), run.precision.compute != "fp64"
    made = build_optimizer(run)
    precision = run.precision.compute if run.precision.float8 == OFF else "float8"
    dtype = torch.float32 if low else torch.float64
    return Case(
        build=partial(build_model, run, dtype=dtype),
        plan=partial(_plan, run, batches),
        batch=batches,
        whole_batch=batches.whole,
        faults=partial(_faults, run, batches, made),
        hang_s=run.train.hang_s,
        loss=build_loss(run),
        optimizer=partial(torch.optim.SGD, lr=SGD_LR) if low else made,
        inputs=run.model.inputs,
        clip=run.train.clip,
        seed=run.train.seed,
        workers=run.workers,
        build_deferred=partial(build_deferred, run, dtype),
        build_plain=_plain_build(run),
        compile=run.train.compile_options,
        precision=precision,
        frozen=run.model.freeze,
    )


def _plain_build(run: RunConfig) -> Callable[[], nn.Module] | None:
    """None where weft makes the model of files, or adds to it."""
    table = run.model
    if table.build is None or table.adapter is not None:
        return None
    resolve_callable(table.build, run.folder, "model.build")  # its module may lie in that folder
    return partial(plain_model, table.build, table.arguments, run.train.seed)


def _faults(run: RunConfig, batches: _Batches, made: OptimizerFactory) -> list[str]:
    table = run.optimizer
    own = {"no_decay": table.no_decay, "decay_min_dims": table.decay_min_dims}
    asked = {**own, "groups": table.groups, "arguments": table.arguments}
    faults = [*batches.order_faults(), *factory_faults(made, table.name, asked)]
    return [*faults, *_sync_faults(run)]


def _sync_faults(run: RunConfig) -> list[str]:
    """What a synchroniser and its codec do not have that [sync] asks for."""
    sync, codec = build_sync(run), run.sync.codec
    # bmuf's outer rate is the lr of the method; bytes of a bucket change no number
    asked = {"lr" if key == "rate" else key: value for key, value in run.sync.arguments.items()}
    asked = {"name": run.sync.name, **asked}
    asked.pop("bucket_mb", None)
    if "staleness" in asked and not sync.asynchronous:
        asked.pop("staleness")  # 0: every step waits for all
    elif asked.get("staleness") == "none":
        asked["staleness"] = None
    found = option_faults("[sync]", sync, asked)
    return found + option_faults(
        "[sync.codec]", sync.codec, codec if isinstance(codec, dict) else {"name": codec}
    )


def _plan(run: RunConfig, batches: _Batches, model: nn.Module, layout: str) -> Plan:
    # one device is what the others are held to
    there = on_own_layout(run, layout) if layout == "dp1" else with_layout(run, layout)
    return emulate_float8(build_plan(there, model, sample_batch(run, batches.held())))


@dataclass
class _Batches:
    """The batches that training would take, from the loader that training uses. Samples are made
    as a run in this precision makes them, so that every process draws the same ones."""

    run: RunConfig
    split: str = "train"
    dataset: Dataset | Stream | None = field(default=None, repr=False)
    loaders: dict[tuple[int, int], AnyLoader] = field(default_factory=dict, repr=False)

    def held(self) -> Dataset | Stream:
        if self.dataset is None:
            with self._mode():
                self.dataset = build_dataset(self.run, self.split)
        return self.dataset

    def __call__(self, step: int, data_rank: int, data_size: int) -> Batch:
        loader = self._loader(data_rank, data_size)
        loader.step = step
        with self._mode():
            return next(loader)

    def whole(self, step: int) -> Batch:
        """The samples of a step, read one by one."""
        held, train = self.held(), self.run.train
        collate = build_collate(self.run)
        with self._mode():
            if not isinstance(held, Stream):
                return whole_batch_of(held, self._order()(step), collate)
            places = partial(shuffled_places, train.seed)
            items = streamed_batch_of(held.read, step, train.batch, self._buffer, places)
            samples = [held.sample(item) for item in items]
            return whole_batch_of(samples, range(train.batch), collate)

    def of_one_pass(self, most: int) -> list[Batch]:
        """The whole batches of a pass, at most so many."""
        if not most:
            return []
        held, batch = self.held(), self.run.train.batch
        count = sum(1 for _ in held.read(0)) if isinstance(held, Stream) else len(held)
        return [self.whole(step) for step in range(min(most, count // batch))]

    def _mode(self) -> AbstractContextManager[Any]:
        return mode_of(self.run.precision.compute)

    @property
    def _buffer(self) -> int:
        """A validation takes a stream in its own order."""
        return self.run.data.shuffle_buffer if self.split == "train" else 0

    def order_faults(self) -> list[str]:
        """What is wrong with the order in which the loader takes samples."""
        held, train = self.held(), self.run.train
        if isinstance(held, Stream):
            return place_faults(partial(shuffled_places, train.seed), train.seed)
        pool = self._pool
        seed = None if pool else train.seed
        found = order_faults(self._order(), len(held), train.batch, seed=seed)
        if pool:
            orders = self._order(), self._order(grouped=False)
            found += grouping_faults(*orders, lengths_of(held), train.batch, pool)
        return found

    @property
    def _pool(self) -> int:
        return self.run.data.group_by_length if self.split == "train" else 0

    def _order(self, grouped: bool = True) -> Callable[[int], list[int]]:
        loader = self._loader() if grouped else self._made(0, 1, 0)
        assert not isinstance(loader, StreamLoader)
        return loader.indices

    def _loader(self, data_rank: int = 0, data_size: int = 1) -> AnyLoader:
        place = data_rank, data_size
        if place not in self.loaders:
            # a new one would read all steps before it again, or all samples for their lengths
            self.loaders[place] = self._made(*place, self._pool)
        return self.loaders[place]

    def _made(self, data_rank: int, data_size: int, pool: int) -> AnyLoader:
        train = self.run.train
        return make_loader(
            self.held(),
            train.batch,
            train.seed,
            self._buffer,
            accumulate=train.accumulate,
            data_rank=data_rank,
            data_size=data_size,
            collate_fn=build_collate(self.run),
            group_by_length=pool,
        )
