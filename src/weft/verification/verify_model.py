"""Run a case on one device and under layouts, and report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from weft.core import (
    DRIVER,
    AsyncServers,
    CompileChoice,
    CompileOptions,
    ConfigError,
    Layout,
    LocalSteps,
    Plan,
    Refusal,
    WorkerDied,
    data_rank_indices,
    emulate_float8,
)
from weft.engine import Loss, Optimizers
from weft.launch import HANGS, run_workers
from weft.nn import check_entries
from weft.parallel import DATA_AXES, plan as lay

from .case import Batch, Case
from .coded_gradients import codes_gradients
from .coded_reference import run_coded
from .compare import check_layout
from .delayed_reference import run_delayed
from .difference import SGD_LR
from .layout_result import LayoutResult, failed_result, refused_result
from .mixing import mixed_samples
from .own_gradients import own_gradients
from .reference import Reference, run_reference
from .replica_reference import run_replicas
from .report import VerifyReport
from .rounding import may_be_rounding, measure_rounding, within_rounding
from .server_replay import check_replayed, replayed_reference
from .verified_settings import check_precision


def verify_case(
    case: Case,
    layouts: Sequence[str],
    steps: int = 3,
    done: Callable[[LayoutResult], None] = lambda result: None,
    refused: Mapping[str, Refusal] | None = None,
) -> VerifyReport:
    """Run a case on one device and under each layout, in processes of its own.

    Args:
        case: model, batches, loss and optimizer, in float64.
        layouts: the layouts to compare with one device.
        steps: optimizer steps of each run.
        done: gets each result when it is there.
        refused: those of the layouts that cannot be planned, and why.

    Raises:
        Refusal: There is one layout, and it cannot run.
    """
    refused = refused or {}
    plannable = [layout for layout in layouts if layout not in refused]
    (found,) = run_workers(_references, 1, case, plannable, steps)
    references, results = dict(zip(plannable, found, strict=True)), []
    for layout in layouts:
        try:
            if layout in refused:
                raise refused[layout]
            reference = references[layout]
            if isinstance(reference, Refusal):
                raise reference
            results.append(_under(case, layout, reference))
        except Refusal as error:
            if len(layouts) == 1:
                raise
            results.append(refused_result(layout, error))
        except WorkerDied as error:
            said = error.report.strip().splitlines()[-1]
            why = "hangs" if said == f"exited with code {HANGS}" else f"does not run: {said}"
            results.append(failed_result(layout, f"{why} (rank {error.rank})"))
        done(results[-1])
    later = any(isinstance(each, Reference) and each.reads_later for each in references.values())
    return VerifyReport(tuple(results), steps, reads_later=later)


def _references(case: Case, layouts: Sequence[str], steps: int) -> list[Reference | Refusal]:
    """What each layout is held to: the one-device run, or its schedule's own definition where
    weights are delayed. A refusal where it parts samples that the model or the loss mixes."""
    plain: Reference | None = None
    found: list[Reference | Refusal] = []
    parted: dict[str, Refusal | None] = {"": None}
    with torch.random.fork_rng([]):
        unscaled = own_gradients(case) if layouts and not case.workers else None
    with torch.random.fork_rng([]):  # a build may draw from where the process is
        alone = case.lay(case.model(), "dp1") if layouts else None
    pieces = 1 if alone is None else alone.accumulate
    microbatches = f"accumulate = {pieces}" if pieces > 1 else ""
    synced = alone is not None and alone.sync is not None and not alone.sync.plain
    for layout in layouts:
        parts = ".".join(Layout.parse(layout).active_axes(*DATA_AXES)) or microbatches
        if parts not in parted:
            with torch.random.fork_rng([]):
                parted[parts] = mixed_samples(case, parts)
        if (refused := parted[parts] or unscaled) is not None:
            found.append(refused)
        elif (
            Layout.parse(layout).stage_ranks > 1
            and case.lay(case.model(), layout).schedule.versions
        ):
            if case.precision != "fp64":
                problem = (
                    f"{layout} updates weights with a delay, and this can be verified only in fp64"
                )
                fix = "verify it in fp64, or a synchronous schedule such as 1f1b"
                found.append(ConfigError("--precision", case.precision, problem, fix))
            else:
                found.append(run_delayed(case, layout, steps))
        elif synced and (own := _own_definition(case, layout, steps)) is not None:
            found.append(own)
        else:
            plain = plain or run_reference(case, steps)
            found.append(plain)
    return found


def _own_definition(case: Case, layout: str, steps: int) -> Reference | Refusal | None:
    """What the definition of a layout's synchroniser gives; None where it is the plain run."""
    try:
        with torch.random.fork_rng([]):
            plan = case.lay(case.model(), layout)
        if plan.replicas_step_independently and isinstance(plan.sync, LocalSteps):
            _check_exact(case, "sync.name", plan.sync.name)
            return run_replicas(case, layout, steps)
        if plan.replicas_step_independently and isinstance(plan.sync, AsyncServers):
            _check_exact(case, "sync.name", plan.sync.name)
            return replayed_reference(case, layout, steps)
        if not codes_gradients(plan) or plan.sync is None:
            return None
        _check_exact(case, "sync.codec", plan.sync.codec.name)
        return run_coded(case, layout, steps)
    except Refusal as error:
        return error


def _check_exact(case: Case, field: str, value: str) -> None:
    """Refuse in lower precision what a rounding would change by far. Raises ConfigError."""
    if case.precision != "fp64":
        problem = "changes numbers by design, and this can be verified only in fp64"
        fix = "verify it in fp64, or with the default synchroniser"
        raise ConfigError(field, value, problem, fix)


def _under(case: Case, layout: str, reference: Reference) -> LayoutResult:
    names = (DRIVER, *case.workers) if case.workers else ()
    check = check_replayed if reference.replayed else check_layout
    result = run_workers(
        check, len(names) or Layout.parse(layout).world, case, layout, reference, names=names
    )[0]
    if not may_be_rounding(result, case, reference):
        return result
    return within_rounding(result, run_workers(measure_rounding, 1, case, layout, reference)[0])


def verify(
    build_model: Callable[[], nn.Module],
    plan: Plan | str,
    batch: dict[str, Tensor],
    *,
    loss: Loss,
    optimizer: Optimizers | None = None,
    inputs: Sequence[str] | None = None,
    clip: float | None = None,
    steps: int = 3,
    seed: int = 0,
    workers: Mapping[str, Sequence[str]] | None = None,
    compile: CompileChoice | CompileOptions = "off",
    precision: str = "fp64",
) -> VerifyReport:
    """Check that `plan` gives the loss, gradients and weights of one device, in float64, below 1e-9
    relative error. Starts one process per rank (docs/verify.md).

    Args:
        build_model: builds the model; called in every process after torch.manual_seed(seed).
        plan: a Plan, or a layout alone such as "dp2".
        batch: one global batch; dim 0 counts the plan's samples. Every step uses it.
        loss: (output, batch) -> (sum, weight).
        optimizer: list of (name, parameter) -> torch.optim.Optimizer. Default: AdamW. Below float64
            it is SGD, or one of yours that is torch.optim.SGD: another, which divides by the size
            of a gradient, makes whole steps of its rounding.
        inputs: batch entries that the model is called with. Default: those that its forward names.
        clip: largest global gradient norm. Default: no clipping.
        steps: optimizer steps to compare.
        seed: seed of weights and dropout.
        workers: names of workers -> globs of the modules that live there (docs/workers.md).
        compile: "blocks" or CompileOptions: after the first step, in which every module is
            compared, blocks and loss are compiled.
        precision: "fp64", or within a few roundings "bf16", "fp16", or "float8" of a plan that has
            it, by emulation (docs/precision.md).

    Returns:
        A VerifyReport: `.passed`, `.text()`, `.json()`.

    Raises:
        ConfigError: A precision in which layouts are not verified, or another optimizer than SGD
            below float64.

    Example:
        report = weft.verify(build_model, "dp2.tp2", batch, loss=weft.losses.next_token)
        assert report.passed, report.text()
    """
    check_entries(batch)
    if isinstance(plan, str):
        sample = {key: value[:2] for key, value in batch.items()}
        size = next(iter(batch.values())).shape[0]
        plan = lay(
            _build_seeded(build_model, seed),
            plan,
            batch=size,
            loss=loss,
            inputs=inputs,
            sample=sample,
        )
    check_precision(precision, plan.float8 is not None)
    if optimizer is not None and precision != "fp64":
        made = optimizer(list(_build_seeded(build_model, seed).named_parameters()))
        if not isinstance(made, torch.optim.SGD):
            problem = f"in {precision} layouts are verified with SGD, which keeps a rounding small"
            fix = 'give torch.optim.SGD or leave it out, or use precision = "fp64"'
            raise ConfigError("optimizer", type(made).__name__, problem, fix)
    adam, sgd = partial(torch.optim.AdamW, lr=1e-3), partial(torch.optim.SGD, lr=SGD_LR)
    default = adam if precision == "fp64" else sgd
    case = Case(
        build=partial(_build_seeded, build_model, seed),
        plan=partial(_same_plan, plan, precision),
        batch=partial(_part_of, batch, plan.accumulate),
        loss=loss,
        optimizer=optimizer or default,
        inputs=None if inputs is None else tuple(inputs),
        clip=clip,
        seed=seed,
        workers=workers or {},
        compile=compile,
        precision=precision,
    )
    return verify_case(case, [str(plan.layout)], steps)


def _build_seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def _same_plan(plan: Plan, precision: str, model: nn.Module, layout: str) -> Plan:
    """The plan itself, in the dtype that is verified; for one device, the same without anything to
    divide."""
    dtype, reduce = (torch.float64, "fp32") if precision == "fp64" else (torch.float32, plan.reduce)
    weights = tuple(replace(w, dtype=dtype) for w in plan.weights)
    # it runs on CPUs, whose memory is the host's already
    here = replace(plan, offload_activations=False)
    if precision == "float8":
        whole = replace(emulate_float8(here), weights=weights)
    else:
        whole = replace(here, weights=weights, precision=precision, reduce=reduce, float8=None)
    if layout == str(plan.layout):
        return whole
    return replace(
        whole,
        layout=Layout.parse(layout),
        steps=(),
        batchnorms=(),
        recompute="none",
        fsdp_prefetch=None,
        staging=None,
        staged=None,
    )


def _part_of(batch: Batch, accumulate: int, step: int, data_rank: int, data_size: int) -> Batch:
    size = next(iter(batch.values())).shape[0]
    index = torch.tensor(data_rank_indices(size, accumulate, data_rank, data_size))
    return {key: value[index] for key, value in batch.items()}
