"""Checks of a run before any process starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from weft.core import (
    ConfigError,
    DataError,
    Layout,
    LayoutError,
    PipelineConfig,
    Plan,
    Refusal,
    RunConfig,
    SyncConfig,
    UnsupportedModel,
    place_modules,
)
from weft.engine import (
    OptimizerFactory,
    check_average,
    check_codec,
    check_compiled,
    check_float8,
    check_metrics,
    check_offload_device,
    check_optimizer,
    check_servers,
    check_worker_plan,
    own_device,
    resolve_compile,
    try_optimizer,
)
from weft.nn import check_inputs, check_labels, find_roles
from weft.parallel import (
    FEATURE_AXES,
    SEQUENCE_AXES,
)

from . import data
from .build import (
    build_callbacks,
    build_eval_metrics,
    build_loss,
    build_model,
    build_optimizer,
    build_plan,
    build_skeleton,
    build_sync,
    check_lr_schedule,
    model_inputs,
    planned_dtype,
    with_layout,
)
from .build_data import build_dataset, sample_batch
from .confirm_fault import confirm_fault, has_odd_dtypes, samples_together
from .dry_run import dry_run
from .sample_stream import Stream, first_samples


def check_run(
    run: RunConfig,
    layouts: Sequence[str | Layout] = (),
    refused: Callable[[str, Refusal], None] | None = None,
) -> list[Plan]:
    """Build what the run names, as far as that takes no memory, and plan each layout ([layout] if
    none is given).

    A run that passes is not refused by any of its processes.

    Args:
        run: The run.
        layouts: The layouts.
        refused: Called with each layout that cannot be planned, and why; the others are returned.
            Default: the first such layout ends the check.

    Raises:
        Refusal: The run, or a layout, or with `refused` every layout, cannot be trained.
    """
    build_callbacks(run)
    metrics = build_eval_metrics(run)
    if metrics and not run.train.eval_every:
        problem, fix = "no step runs a validation", "set train.eval_every, as 100"
        raise ConfigError("train.eval_metrics", [*metrics], problem, fix)
    bare, train = build_skeleton(run), build_dataset(run)
    check_lr_schedule(run)
    factory = build_optimizer(run)
    _check_own_optimizer(run, factory)
    made = factory([("weight", nn.Parameter(torch.zeros(2, 2)))])
    plans: list[Plan] = []
    last: Refusal | None = None
    for axes in layouts or [run.layout.axes]:
        try:
            each = plan_without_weights(with_layout(run, axes), bare, train)
            factory.check(each.weights)
            with _named_by(run):
                check_optimizer(made, each.replica())
                check_servers(made, each)
                check_codec(made, each)
            check_metrics(metrics, each)
            _check_workers(run, bare, each)
            check_compiled(bare, each.blocks)
            resolve_compile(run.train.compile_options, each, own_device())
            _check_period(run, each)
            if run.train.ema is not None:
                check_average(each, run.train.ema, bool(run.workers))
            check_sizes(bare, train, [each])
            plans.append(each)
        except Refusal as reason:
            if refused is None:
                raise
            refused(str(axes), reason)
            last = reason
    if last is not None and not plans:
        raise last
    for split, held in (
        ("train", train),
        *([("val", build_dataset(run, "val"))] if run.train.eval_every else []),
    ):
        if isinstance(held, Stream):
            held.check(run.train.batch, split)
        elif len(held) < run.train.batch:
            problem = f"the split {split!r} has {len(held)} samples, fewer than one batch"
            raise DataError(
                "train.batch", run.train.batch, problem, f"use at most {len(held)}, or more data"
            )
    inputs, loss, sample = model_inputs(run, bare), build_loss(run), sample_batch(run, train)
    check_inputs(bare, inputs, first_samples(train, 1)[0])
    check_labels(loss, sample)
    counted = any(laid.layout.size(*SEQUENCE_AXES) > 1 for laid in plans)
    tried = dry_run(bare, loss, inputs, sample, counted=counted, metrics=[*metrics.values()])
    if tried.error or has_odd_dtypes(bare, inputs, sample):
        micro = sample_batch(run, train, samples_together(plans[0]))
        confirm_fault(run, bare, loss, inputs, micro, [*metrics.values()])
    # on a GPU a forward may call other functions than without weights
    own_gradients = tried.own_gradients or own_device().type != "cpu"
    return [replace(each, own_gradients=own_gradients) for each in plans]


def _check_own_optimizer(run: RunConfig, factory: OptimizerFactory) -> None:
    """Refuse what an optimizer of the user's own cannot do."""
    if run.optimizer.build is None:
        return
    numbers, sync = try_optimizer(factory, run.optimizer.build), build_sync(run)
    if numbers and (run.workers or sync.asynchronous):
        where = "[workers]" if run.workers else f"servers of {sync.name}"
        problem = f"its state has numbers, such as a step count, and {where} can send only tensors"
        fix = "keep them as tensors, or use adamw"
        raise ConfigError("optimizer.build", run.optimizer.build, problem, fix)


@contextmanager
def _named_by(run: RunConfig) -> Iterator[None]:
    """A refusal of an optimizer names the key that the run file has."""
    try:
        yield
    except ConfigError as error:
        if run.optimizer.build is None or error.field != "optimizer.name":
            raise
        built = "optimizer.build", run.optimizer.build
        raise ConfigError(*built, error.problem, error.fix) from None


def check_device(run: RunConfig, plans: Sequence[Plan], device: torch.device) -> None:
    """Refuse what the ranks' devices do not do, where processes start on them. Raises Refusal."""
    if run.train.memory_snapshot is not None and device.type != "cuda":
        problem = "it shows the memory of GPUs, and the ranks run on the CPU"
        fix = "leave it out: metrics have the peak as memory_bytes, and `weft plan` its parts"
        raise ConfigError("train.memory_snapshot", run.train.memory_snapshot, problem, fix)
    for each in plans:
        check_offload_device(each, device)
        check_float8(each.float8, device)


def _check_period(run: RunConfig, laid: Plan) -> None:
    """Refuse a period of [sync] that is longer than the run."""
    period = laid.sync.period if laid.sync is not None and laid.replicas_step_independently else 1
    if period > run.train.steps:
        problem = f"the run ends after {run.train.steps} steps, before any synchronisation"
        raise ConfigError("sync.period", period, problem, f"use at most {run.train.steps}")


def _check_workers(run: RunConfig, bare: nn.Module, laid: Plan) -> None:
    """Refuse tables that do not work with [workers]."""
    if not run.workers:
        return
    for name, table, plain in (
        ("pipeline", run.pipeline, PipelineConfig()),
        ("sync", run.sync, SyncConfig()),
    ):
        for key, value in table.model_dump().items():
            if value != plain.model_dump().get(key):
                problem = "there is one driver, whose calls run one after the other"
                raise ConfigError(
                    f"{name}.{key}", value, problem, f"leave [{name}] out, or [workers]"
                )
    if run.train.profile is not None:
        problem = "a profile shows the ranks of a layout, and a run with [workers] has no layout"
        raise ConfigError("train.profile", run.train.profile, problem, "leave it out")
    if run.train.compile == "blocks":
        problem = "blocks call modules of other processes, and torch.compile cannot trace those"
        fix = "leave compile out, or [workers]"
        raise ConfigError("train.compile", "blocks", problem, fix)
    check_worker_plan(laid, place_modules(bare, run.workers))


def plan_without_weights(
    run: RunConfig, bare: nn.Module, train: data.Dataset | Stream, load: bool = True
) -> Plan:
    """Plan the run before any process starts, and refuse what a rank would refuse.

    Args:
        run: The run.
        bare: Its model without weights.
        train: Its training data, of which a sample is taken.
        load: Whether the model may be built with weights if its forward cannot be traced without.

    Raises:
        Refusal: The plan or the features of [train] do not work together.
    """
    if run.pipeline.cut == "time":  # a model without data has no times: the ranks measure theirs
        run = run.model_copy(update={"pipeline": run.pipeline.model_copy(update={"cut": "flops"})})
    sample = sample_batch(run, train)
    try:
        made = build_plan(run, bare, sample)
    except UnsupportedModel:
        if not (
            load and run.layout.axes.stage_ranks > 1 and any(p.is_meta for p in bare.parameters())
        ):
            raise
        made = build_plan(run, build_model(run, dtype=planned_dtype(run)), sample)
    if run.train.rollback is not None:
        _check_rollback(run, made)
    if run.checkpoint.keep_best:
        _check_best(run, made)
    for field, value in (("train.clip", run.train.clip), ("train.skip", run.train.skip)):
        if value is not None and made.schedule.versions:
            problem = (
                f"{made.schedule.name} updates each stage by itself, and no stage knows the norm of"
                " all gradients"
            )
            raise ConfigError(
                field, value, problem, "leave it out, or use a synchronous schedule such as 1f1b"
            )
    sync = made.sync
    if run.train.skip is not None and sync is not None:
        if sync.asynchronous and made.replicas_step_independently:
            problem = (
                f"{sync.name} updates weights at a server, at different times for each replica"
            )
            raise ConfigError(
                "train.skip", run.train.skip, problem, "leave it out, or use staleness = 0"
            )
        if not sync.independent and sync.codec.keeps_residual:
            problem = (
                f"{sync.codec.name} keeps the unsent part of a skipped gradient, and would send"
                " it with the next one"
            )
            raise ConfigError(
                "train.skip",
                run.train.skip,
                problem,
                "leave it out, or use a codec without feedback",
            )
    return made


def _check_rollback(run: RunConfig, made: Plan) -> None:
    problem, fix = "", "leave it out"
    if not run.checkpoint.every:
        problem, fix = "there would be no checkpoint to go back to", "set checkpoint.every, as 100"
    elif made.schedule.versions:
        problem, fix = (
            f"{made.schedule.name} keeps older versions of the weights, which a"
            " checkpoint does not hold",
            f"{fix}, or use 1f1b",
        )
    elif made.replicas_step_independently:
        problem = f"replicas under {run.sync.name} are at different steps, and none goes back alone"
    if problem:
        raise ConfigError("train.rollback", run.train.rollback, problem, fix)


def _check_best(run: RunConfig, made: Plan) -> None:
    problem, fix = "", "leave it out"
    if not run.train.eval_every:
        problem, fix = "there is no validation", "set train.eval_every, as 100"
    elif made.replicas_step_independently:
        problem = f"replicas under {run.sync.name} are at different steps, and save each its own"
    if problem:
        raise ConfigError("checkpoint.keep_best", True, problem, fix)


def check_sizes(model: nn.Module, held: data.Dataset | Stream, plans: Sequence[Plan]) -> None:
    """Check that the model has a row for every token, and that sequences divide where a plan cuts
    them. Raises ConfigError, LayoutError."""
    ids = first_samples(held, 1)[0].get("input_ids")
    vocab, embeddings = getattr(held, "vocab", None), find_roles(model).embeddings
    if ids is None:
        return
    if vocab is not None and embeddings:
        rows = model.get_submodule(embeddings[0]).num_embeddings
        if isinstance(rows, int) and rows < vocab:
            problem = f"{embeddings[0]} has {rows} rows, and the data has {vocab} tokens"
            raise ConfigError(
                "model", embeddings[0], problem, f"give the model a vocabulary of at least {vocab}"
            )
    for laid in plans:
        size = laid.layout.size(*FEATURE_AXES)
        parts = laid.layout.size(*FEATURE_AXES, *SEQUENCE_AXES)
        if laid.layout.has_option("sequence") and len(ids) % parts:
            problem = (
                f"{FEATURE_AXES[0]}{size} cuts sequences of {len(ids) * size // parts} tokens,"
                " which it does not divide"
            )
            raise LayoutError(
                "layout", str(laid.layout), problem, f"use a seq_len that is a multiple of {parts}"
            )
