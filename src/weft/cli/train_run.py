"""Trains in processes of this host, as one rank that another launcher started, or as one of several
hosts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from weft.checkpoint import CHECKPOINTS, latest_step, quarantine_latest
from weft.core import (
    DRIVER,
    STOPPED,
    TRACEBACK,
    ConfigError,
    DamagedCheckpoint,
    LayoutError,
    Plan,
    RunConfig,
    WeftError,
    WorkerDied,
    dump_toml,
    replace_file,
)
from weft.launch import (
    AGENT,
    Backend,
    Rendezvous,
    backend_of_run,
    check_one_host,
    join_replica,
    join_world,
    launched_rank,
    leave_world,
    local_world_size,
    log_line,
    on_stop_signal,
    quarantine_damaged,
    rendezvous_store,
    restart_count,
    run_replicas,
    run_with_restarts,
    run_workers,
    ungated_error,
    wait_as_spare,
)
from weft.planner import compare_with_prediction
from weft.train import (
    RunEvents,
    check_device,
    check_output,
    check_run,
    replica_ranks,
    run_lock,
    server_replicas,
    shrink_to,
    train,
)

ENDS_S = 60.0  # for the ranks before, on a host that was cut off, to end


def train_and_compare(run: RunConfig, resume: bool, trace: bool = False, **options: Any) -> bool:
    """Train as one rank, and print at the end what the planner expected of the run."""
    return train(run, resume, trace, compare=compare_with_prediction, **options)


def saved_step(run: RunConfig) -> int | None:
    """The step of the run's latest checkpoint; None without a checkpoint."""
    return latest_step(Path(run.output) / CHECKPOINTS)


def train_here(run: RunConfig, resume: bool, trace: bool) -> bool:
    """Train in processes of this host; whether it was stopped before the last step. Raises Refusal,
    WeftError."""
    (checked,) = check_run(run)
    _check_device(run, [checked], run.world)
    with run_lock(run.output, make=not resume):
        return _train_here(run, resume, trace, checked)


def _train_here(run: RunConfig, resume: bool, trace: bool, checked: Plan) -> bool:
    names = (DRIVER, *run.workers) if run.workers else ()
    kept, set_aside = (
        partial(saved_step, run),
        partial(quarantine_latest, Path(run.output) / CHECKPOINTS),
    )
    while True:
        try:
            check_output(run, resume)
            break
        except DamagedCheckpoint as error:
            quarantine_damaged(error, set_aside, kept)
    world, worlds, events = run.world, replica_ranks(run), RunEvents(Path(run.output))
    threads, backend = run.train.threads, _backend(run, world)
    train_rank = partial(train_and_compare, checked=checked)

    def start_replicas(resume: bool) -> list:
        return run_replicas(
            train_rank,
            worlds,
            run,
            resume,
            trace,
            threads=threads,
            backend=backend,
            needed=server_replicas(run),
            hang_s=run.train.hang_s,
        )

    def start(resume: bool) -> list:
        return run_workers(
            train_rank,
            world,
            run,
            resume,
            trace,
            threads=threads,
            backend=backend,
            names=names,
            hang_s=run.train.hang_s,
        )

    # replicas start anew what dies; but none sets a damaged checkpoint aside
    begin, restarts = (start_replicas, 0) if worlds else (start, run.checkpoint.restarts)
    with traceback_in_file(Path(run.output)), noted_failure(events):
        told = partial(events.add, "died")
        return any(run_with_restarts(begin, kept, set_aside, resume, restarts, told))


@contextmanager
def noted_failure(events: RunEvents) -> Iterator[None]:
    """Add the error that ends a run to its events."""
    try:
        yield
    except WeftError as error:
        events.add("failed", None, str(error))
        raise


@contextmanager
def traceback_in_file(folder: Path) -> Iterator[None]:
    """Where code of the user's ended a rank, print one line, and keep the traceback in a file."""
    try:
        yield
    except WorkerDied as error:
        if not error.fault:
            raise
        path = folder / TRACEBACK
        try:
            replace_file(path, error.report)
        except OSError:
            raise error from None
        raise WeftError(f"{error.who} died: {error.fault}. The traceback is in {path}") from None


def train_as_rank(run: RunConfig, resume: bool, trace: bool) -> bool:
    """Train as one rank of those that torchrun, srun or an agent of weft started; whether it was
    stopped before the last step. Raises Refusal, WeftError."""
    found, elastic = launched_rank(), run.layout.elastic or os.environ.get(AGENT) == "elastic"
    assert found is not None
    rank, ranks, _ = found
    if ranks != run.world and (not elastic or run.workers):
        raise world_size_error(run, "WORLD_SIZE", ranks)
    if run.workers:
        check_one_host()
    laid = run if ranks == run.world else shrink_to(run, ranks)
    if replica_ranks(laid) and ranks != run.world:
        raise _fixed_layout_error(run)
    checked = None
    if not run.workers or rank == 0:  # workers need no data
        (checked,) = check_run(laid)
        _check_device(run, [checked], local_world_size())
    again = AGENT in os.environ or restart_count() > 0
    lock = run_lock(run.output, make=not resume, patience_s=ENDS_S if again else 0.0)
    with lock if rank == 0 else nullcontext():
        return _train_as_rank(run, laid, resume, trace, again, checked)


def _train_as_rank(
    run: RunConfig, laid: RunConfig, resume: bool, trace: bool, again: bool, checked: Plan | None
) -> bool:
    found = launched_rank()
    assert found is not None
    (rank, ranks, _), world, worlds = found, laid.world, replica_ranks(laid)
    if again:
        resume = saved_step(run) is not None
    if not again or resume:
        check_output(laid, resume)
    if rank == 0 and ranks != run.world:
        spare = f", {ranks - world} of them as spares" if ranks > world else ""
        log_line(
            f"{ranks} ranks are here{spare}: layout {laid.layout.axes}, in place of"
            f" {run.layout.axes}"
        )
    threads, backend = run.train.threads, _backend(run, local_world_size())
    if worlds:
        with join_replica(backend, threads, worlds, run.train.hang_s):
            return train_and_compare(run, resume, trace, again=again, checked=checked)
    store = rendezvous_store()
    if rank >= world:
        return wait_as_spare(store, rank, ranks)
    try:
        noted = noted_failure(RunEvents(Path(run.output), writes=rank == 0))
        with join_world(backend, threads, world, store, run.train.hang_s), noted:
            stopped = train_and_compare(
                laid, resume, trace, again=again, asked=run, checked=checked
            )
    except DamagedCheckpoint as error:
        if rank == 0:  # whoever starts the ranks anew finds the one before
            quarantine_damaged(
                error,
                partial(quarantine_latest, Path(run.output) / CHECKPOINTS),
                partial(saved_step, run),
            )
        raise SystemExit(1) from None
    except RuntimeError as error:
        if AGENT not in os.environ or "by peer" not in str(error):
            raise
        log_line(
            f"rank {rank}: a rank that it was connected to has ended"
        )  # which says itself why, if it can
        raise SystemExit(1) from None
    if ranks > world:
        leave_world(store, rank, ranks, stopped)
    return stopped


def train_as_host(
    run: RunConfig,
    count: tuple[int, int],
    ranks: int | None,
    meeting: Rendezvous,
    resume: bool | None,
    arguments: Sequence[str],
) -> bool:
    """This host's part in a run over `count`, from the least to the most hosts, each with so many
    ranks; whether it was stopped before the last step. `resume`: None goes on from a checkpoint if
    there is one; `arguments`: those with which the ranks are called. Raises Refusal, WeftError."""
    with on_stop_signal(_stop):  # until there are ranks, which the agent then tells
        return _host(run, count, ranks, meeting, resume, arguments)


def _stop() -> None:
    raise SystemExit(STOPPED)


def _host(
    run: RunConfig,
    count: tuple[int, int],
    ranks: int | None,
    meeting: Rendezvous,
    resume: bool | None,
    arguments: Sequence[str],
) -> bool:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        fix = "leave --nodes out, or start it without torchrun"
        raise ConfigError(
            "--nodes", f"{count[0]}:{count[1]}", "torchrun has started this process as a rank", fix
        )
    least, most = count
    each = ranks or torch.cuda.device_count() or -(-run.world // most)
    _check_device(run, check_hosts(run, least, most, each), each)

    def begin() -> None:
        check_output(run, saved_step(run) is not None if resume is None else resume)

    settings = dump_toml(run.model_copy(update={"folder": "."})) + f"{least} {most} {each}"
    from weft.launch import (  # it brings much with it, which runs of one host do without
        HostsSpec,
        run_host,
    )

    hosts_of = HostsSpec(least, most, each, meeting, run.checkpoint.restarts)
    name = "weft-" + re.sub(r"\W", "-", Path(run.output).name)
    return run_host(
        hosts_of,
        name,
        f"{crc32(settings.encode()):08x}",
        ["-m", "weft", "train", *arguments],
        begin,
    )


def check_hosts(run: RunConfig, least: int, most: int, each: int) -> list[Plan]:
    """All that is refused of a run over `least` to `most` hosts with `each` ranks on every one.
    Returns its plans. Raises Refusal."""
    world = run.world
    if run.workers and most > 1:
        raise ungated_error("--nodes", most if least == most else f"{least}:{most}")
    if world > most * each or (least == most and world != most * each):
        raise world_size_error(run, "--nodes", most, f"{most * each} on {most} hosts")
    if replica_ranks(run) and least < most:
        raise _fixed_layout_error(run)
    plans = check_run(run)
    if least < most:
        for hosts in range(least, most):
            shrink_to(run, hosts * each)
    return plans


def world_size_error(
    run: RunConfig, field: str, value: int | None, what: str | None = None
) -> LayoutError:
    """There are not as many ranks as the run has: `value` of them, or `what`."""
    here = f"and there are {what or value}"
    if run.workers:
        problem = f"a driver and {', '.join(run.workers)} need {run.world} processes, {here}"
        return LayoutError(field, value, problem, f"use {run.world}")
    fix = f'use {run.world} ranks, or a layout of as many ranks as there are, such as "dp{value}"'
    return LayoutError(field, value, f"layout {run.layout.axes} has {run.world} ranks, {here}", fix)


def _fixed_layout_error(run: RunConfig) -> ConfigError:
    problem = f"replicas under {run.sync.name} continue without a failed one, and keep the layout"
    return ConfigError(
        "sync.name", run.sync.name, problem, "use a fixed number of hosts, or allreduce"
    )


def _backend(run: RunConfig, local_ranks: int) -> Backend:
    """As the run asks for; gloo on the CPU for workers by name. Raises ConfigError."""
    gpus, backend = torch.cuda.device_count(), backend_of_run(run, local_ranks)
    if gpus and run.workers:
        log_line(f"{', '.join(run.workers)} and the driver run on the CPU")
    elif gpus and backend == "gloo":
        log_line(f"{local_ranks} ranks and {gpus} GPUs on this host: running on the CPU")
    return backend


def _check_device(run: RunConfig, plans: Sequence[Plan], local_ranks: int) -> None:
    """Refuse plans that the devices of this host do not run. Raises Refusal."""
    kind = "cuda" if backend_of_run(run, local_ranks) == "nccl" else "cpu"
    check_device(run, plans, torch.device(kind))
