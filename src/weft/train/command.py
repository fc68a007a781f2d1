"""`weft train`: a run of this host alone, one rank of a run that others started, or this host's part in one of
several."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from zlib import crc32

import torch

from .. import build, checkpoint, tables
from ..config import Run
from ..errors import STOPPED, ConfigError, DamagedCheckpoint, LayoutError
from ..launch import fewer, processes, replicas, restarts
from ..launch.environment import AGENT, attempt, environment, local_world
from ..launch.hosts import Meeting
from ..launch.processes import Backend
from ..launch.say import say
from ..launch.signals import told_to_stop
from ..places import DRIVER
from . import trainer
from .output import CHECKPOINTS, check_output


def saved(run: Run) -> int | None:
    """The step of the run's latest checkpoint; None if it has none."""
    return checkpoint.latest(Path(run.output) / CHECKPOINTS)


def alone(run: Run, resume: bool, trace: bool) -> bool:
    """Train in processes of this host; whether it was stopped before the last step. Raises Refusal, WeftError."""
    build.check(run)
    names = (DRIVER, *run.workers) if run.workers else ()
    kept, set_aside = partial(saved, run), partial(checkpoint.set_aside, Path(run.output) / CHECKPOINTS)
    while True:
        try:
            check_output(run, resume)
            break
        except DamagedCheckpoint as error:
            restarts.whole_before(error, set_aside, kept)
    world, worlds = run.world, build.apart(run)
    threads, backend = run.train.threads, _backend(run, world)
    if worlds:
        needed = build.servers(run)
        return any(
            replicas.run(trainer.train, worlds, run, resume, trace, threads=threads, backend=backend, needed=needed)
        )

    def start(resume: bool) -> list:
        return processes.run(trainer.train, world, run, resume, trace, threads=threads, backend=backend, names=names)

    return any(restarts.survive(start, kept, set_aside, resume, run.checkpoint.restarts))


def joined(run: Run, resume: bool, trace: bool) -> bool:
    """Train as one rank of those that torchrun, srun or an agent of weft started; whether it was stopped before the
    last step. Raises Refusal, WeftError."""
    found, elastic = environment(), run.layout.elastic or os.environ.get(AGENT) == "elastic"
    assert found is not None
    rank, ranks, _ = found
    if ranks != run.world and (not elastic or run.workers):
        raise unfit(run, "WORLD_SIZE", ranks)
    laid = run if ranks == run.world else fewer.fitted(run, ranks)
    world, worlds = laid.world, build.apart(laid)
    if worlds and ranks != run.world:
        raise _apart(run)
    if not run.workers or rank == 0:  # workers need no data
        build.check(laid)
    again = AGENT in os.environ or attempt() > 0
    if again:
        resume = saved(run) is not None
    if not again or resume:
        check_output(laid, resume)
    if rank == 0 and ranks != run.world:
        spare = f", {ranks - world} of them to stand by" if ranks > world else ""
        say(f"{ranks} ranks are here{spare}: layout {laid.layout.axes}, of {run.layout.axes} as asked")
    threads, backend = run.train.threads, _backend(run, local_world())
    if worlds:
        with replicas.join(backend, threads, worlds):
            return trainer.train(run, resume, trace, again)
    store = processes.rendezvous_store()
    if rank >= world:
        return processes.stand_by(store, rank, ranks)
    try:
        with processes.join(backend, threads, world, store):
            stopped = trainer.train(laid, resume, trace, again, asked=run)
    except DamagedCheckpoint as error:
        if rank == 0:  # whoever starts the ranks anew finds the one before
            restarts.whole_before(
                error, partial(checkpoint.set_aside, Path(run.output) / CHECKPOINTS), partial(saved, run)
            )
        raise SystemExit(1) from None
    except RuntimeError as error:
        if AGENT not in os.environ or "by peer" not in str(error):
            raise
        say(f"rank {rank}: a rank that it was connected to has gone")  # which says itself why, if it can
        raise SystemExit(1) from None
    if ranks > world:
        processes.leave(store, rank, ranks, stopped)
    return stopped


def host(
    run: Run, count: tuple[int, int], ranks: int | None, meeting: Meeting, resume: bool | None, arguments: Sequence[str]
) -> bool:
    """This host's part in a run over `count`, from the least to the most hosts, each with so many ranks; whether it was
    stopped before the last step. `resume`: None goes on from a checkpoint if there is one; `arguments`: those with
    which the ranks are called. Raises Refusal, WeftError."""
    with told_to_stop(_stop):  # until there are ranks, which the agent then tells
        return _host(run, count, ranks, meeting, resume, arguments)


def _stop() -> None:
    raise SystemExit(STOPPED)


def _host(
    run: Run, count: tuple[int, int], ranks: int | None, meeting: Meeting, resume: bool | None, arguments: Sequence[str]
) -> bool:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        fix = "leave --nodes out, or start it without torchrun"
        raise ConfigError("--nodes", f"{count[0]}:{count[1]}", "torchrun has started this process as a rank", fix)
    least, most = count
    each = ranks or torch.cuda.device_count() or -(-run.world // most)
    check_hosts(run, least, most, each)

    def begin() -> None:
        check_output(run, saved(run) is not None if resume is None else resume)

    settings = tables.dump(run.model_copy(update={"folder": "."})) + f"{least} {most} {each}"
    from ..launch import agent  # it brings much with it, which runs of one host do without

    hosts_of = agent.Hosts(least, most, each, meeting, run.checkpoint.restarts)
    name = "weft-" + re.sub(r"\W", "-", Path(run.output).name)
    return agent.run(hosts_of, name, f"{crc32(settings.encode()):08x}", ["-m", "weft", "train", *arguments], begin)


def check_hosts(run: Run, least: int, most: int, each: int) -> None:
    """All that is refused of a run over `least` to `most` hosts with `each` ranks on every one. Raises Refusal."""
    world = run.world
    if world > most * each or (least == most and world != most * each):
        raise unfit(run, "--nodes", most, f"{most * each} on {most} hosts")
    if build.apart(run) and least < most:
        raise _apart(run)
    if run.workers and least < most:
        problem = "each of its workers has what no other has, so all hosts are needed"
        raise ConfigError("--nodes", f"{least}:{most}", problem, f"use --nodes {most}")
    build.check(run)
    if least < most:
        for hosts in range(least, most):
            fewer.fitted(run, hosts * each)


def unfit(run: Run, field: str, value: int | None, what: str | None = None) -> LayoutError:
    """There are not as many ranks as the run has: `value` of them, or `what`."""
    here = f"and there are {what or value}"
    if run.workers:
        problem = f"a driver and {', '.join(run.workers)} are {run.world} processes, {here}"
        return LayoutError(field, value, problem, f"use {run.world}")
    fix = f'use {run.world} ranks, or a layout of as many ranks as there are, such as "dp{value}"'
    return LayoutError(field, value, f"layout {run.layout.axes} has {run.world} ranks, {here}", fix)


def _apart(run: Run) -> ConfigError:
    problem = f"replicas under {run.sync.name} go on by themselves without one that fails, and keep the layout"
    return ConfigError("sync.name", run.sync.name, problem, "use a fixed number of hosts, or allreduce")


def _backend(run: Run, local_ranks: int) -> Backend:
    """NCCL if every rank of this host has a GPU of its own, else gloo on the CPU, as for workers by name."""
    gpus = torch.cuda.device_count()
    if gpus and run.workers:
        say(f"{', '.join(run.workers)} and the driver run on the CPU")
        return "gloo"
    if 0 < gpus < local_ranks:
        say(f"{local_ranks} ranks and {gpus} GPUs on this host: running on the CPU")
    return "nccl" if gpus >= local_ranks else "gloo"
