"""What every rank of `weft train` runs, from the process group to the summary."""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

from weft.checkpoint import fill_engine
from weft.core import (
    DRIVER,
    PLAN,
    RUN_FILE,
    ConfigError,
    Plan,
    RunConfig,
    dump_toml,
    replace_file,
)
from weft.engine import Engine, Remote, ReplicaGroup, TrainingEngine, WeightAverage
from weft.launch import RARE_S, Watchdog, replica_slot, rpc_session
from weft.parallel import (
    DATA_AXES,
)

from . import build, build_data
from .callbacks import Callbacks
from .data import Dataset, NoDataset
from .generate import sample_text, text_coder
from .gpu_use import why_unknown
from .loggers import has_tensorboard
from .memory_snapshot import MemorySnapshot
from .metrics import Metrics, peak_memory_bytes, rate_unit
from .prefetch import prefetched
from .progress import Progress
from .rank_record import RankRecord
from .run_events import RunEvent, RunEvents
from .run_folder import (
    DATA,
    SAMPLE,
    check_output,
    loop_state,
    refuse_other_data,
    replicas_without_checkpoint,
    resume_folder,
)
from .run_summary import run_header, run_summary
from .sample_stream import Stream, first_samples
from .step_profiler import StepProfiler, StepRecorder
from .stop_request import StopRequest
from .stream_loader import AnyLoader, make_loader
from .trace_recorder import FIRST, TraceRecorder
from .train_loop import Compare, TrainLoop, finishing_checkpoint
from .validation import Validation


def train(
    run: RunConfig,
    resume: bool,
    trace: bool = False,
    again: bool = False,
    asked: RunConfig | None = None,
    compare: Compare | None = None,
    checked: Plan | None = None,
) -> bool:
    """Train the run on every rank of its layout; rank 0 writes and prints.

    If SIGTERM reaches a rank, it saves a checkpoint and returns early.

    Args:
        run: The run.
        resume: Whether to start from the latest checkpoint of the run folder.
        trace: Whether to record a few steps, and draw them under the predicted ones.
        again: Whether processes of this run have died, and the folder is its own.
        asked: The run as the user wrote it, if `run` is the same on fewer ranks.
        compare: Makes the last lines of the summary, such as the predicted time of a step beside
            the measured one.
        checked: The plan that `check_run` has made of this run, which ranks need not make again.

    Returns:
        Whether steps are left to take.

    Raises:
        Refusal: The run cannot be trained as it is.
        WeftError: The loss or a weight is no longer finite.
    """
    run, asked = build_data.count_steps(run), build_data.count_steps(asked or run)
    snapshot = MemorySnapshot(run.train.memory_snapshot, Path(run.output))
    with rpc_session((DRIVER, *run.workers)) if run.workers else nullcontext(), snapshot():
        return _train(run, resume, trace, again, asked, compare, snapshot, checked)


def _train(
    run: RunConfig,
    resume: bool,
    trace: bool,
    again: bool,
    asked: RunConfig,
    compare: Compare | None,
    snapshot: MemorySnapshot,
    checked: Plan | None,
) -> bool:
    began, t, folder, company = time.perf_counter(), run.train, Path(run.output), replica_slot()
    before_bytes = peak_memory_bytes(torch.device("cpu"))
    with Watchdog(t.hang_s) as start, start.starting():
        with start.alone("looking at the run folder"):
            # else others have written there meanwhile
            if not again and (company is None or not company.incarnation):
                check_output(run, resume)
        if dist.is_initialized():
            dist.barrier()  # no rank may find what rank 0 has written already
        rank = dist.get_rank() if dist.is_initialized() else 0
        reads = not (run.workers and rank)  # workers need no data
        with start.alone("building data and model"):
            dataset = build_data.build_dataset(run) if reads else NoDataset(t.batch)
            val = build_data.build_dataset(run, "val") if t.eval_every and reads else None
            text = text_coder(run, dataset) if t.sample_tokens and reads else None
            sample = build_data.sample_batch(run, dataset)
            model, plan = build.build_for_ranks(run, sample, _weights_dtype(run), checked)
        engine = _engine(run, model, plan, sample, company)
        average = None
        if t.ema is not None and isinstance(engine, Engine):
            average = WeightAverage(engine, t.ema, t.ema_warmup)
        start.beat("the engine")
        scalars: dict[str, Any] = {}
        samples = len(dataset) if reads and not isinstance(dataset, Stream) else None
        if resume and not engine.replicas.caught_up:
            found = resume_folder(run, engine.replicas.index)
            scalars = fill_engine(average or engine, found, None)
            refuse_other_data(scalars, samples)
            start.beat("loading a checkpoint")
        engine.connect()
    shares = (
        engine.global_plan.layout.replica_count if engine.replicas.servers_update else 1
    )  # replicas are never at one step
    val_loader = None
    if val is not None:
        val_loader = _loader(run, engine, val, shares=shares, validates=True)
    notes = [*engine.global_plan.notes]
    done = engine.steps_done
    if engine.codec_state_lost:
        notes.append("what codecs had kept was another layout's or codec's: it begins anew")
    if resume and engine.replicas.exchanges_weights:
        without = replicas_without_checkpoint(run, engine.global_plan.layout.replica_count)
        notes += [
            f"replica {n} has no checkpoint of step {done}: it goes on from the run's"
            for n in without
        ]
    if t.loggers is None and not has_tensorboard():
        notes.append('no events for TensorBoard: pip install "weft[tensorboard]"')
    if why := why_unknown(engine.mesh.device):
        notes.append(f"no gpu_utilization: {why}")
    if trace and t.steps - done < FIRST:
        problem = (
            f"leaves {t.steps - done} steps to run, and tracing starts with number {FIRST} of them"
        )
        raise ConfigError(
            "train.steps", t.steps, problem, f"use at least {done + FIRST}, or leave --trace out"
        )
    left_out, losses = loop_state(scalars)
    loading = prefetched(
        _loader(run, engine, dataset, scalars.get(DATA), start=done + left_out),
        run.data.workers if reads else 0,
        run.data.prefetch,
        engine.mesh.device.type == "cuda",
    )
    if rank == 0 and engine.replicas.leads:
        replace_file(folder / RUN_FILE, dump_toml(asked))
        replace_file(folder / PLAN, f"{engine.global_plan}\n")

    console = Console(quiet=rank != 0 or not engine.replicas.leads)
    recorder = (
        TraceRecorder(engine)
        if trace and engine.replicas.leads and isinstance(engine, Engine)
        else None
    )
    profiler: StepProfiler | None = None
    recorders: list[StepRecorder] = [snapshot]
    if t.profile is not None and engine.replicas.leads and isinstance(engine, Engine):
        profiler = StepProfiler(engine, t.profiled_steps)
        recorders.append(profiler)
    progress = Progress(console, t.steps, done)
    header = run_header(run, engine, done, notes)
    progress.table(header)
    events = RunEvents(folder, writes=rank == 0 and engine.replicas.leads)
    events.add("resumed" if done else "started", done, header["layout"], header)
    held = RankRecord(engine, folder, before_bytes, events.writes)
    named, tables = build.build_callbacks(run), asked.model_dump(mode="json", exclude_none=True)
    watched = {"steps": t.steps, "folder": folder, "config": tables, "say": progress.say}
    limit_s = t.hang_s
    if limit_s is None and (engine.replicas.independent or isinstance(engine, Remote)):
        limit_s = RARE_S  # an exchange of weights, or the driver, may take longer than any step
    watchdog = Watchdog(limit_s)
    callbacks = Callbacks(named, engine, watchdog.rare, **watched)
    # of replicas that are apart the one that leads writes, and another may lead later
    metrics = Metrics(folder, done, engine.replicas.leads, callbacks.log) if rank == 0 else None
    with (
        StopRequest() as interrupt,
        progress,
        watchdog,
        callbacks,
        loading as loader,
    ):
        validation = (
            Validation(
                run, engine, val_loader, watchdog, shares, build.build_eval_metrics(run), average
            )
            if val_loader is not None
            else None
        )
        loop = TrainLoop(
            run,
            engine,
            loader,
            validation,
            rate_unit(first_samples(dataset, 1)[0], t.batch),
            metrics,
            progress,
            watchdog,
            callbacks,
            events,
            held,
            recorder,
            average,
            recorders,
            samples=samples,
            passed=left_out,
        )
        loop.spikes.restore(losses)
        loop.best.restore(scalars)
        if isinstance(engine, Remote):
            engine.heard = partial(
                watchdog.beat, "a call"
            )  # while the driver validates a worker takes no steps
        with finishing_checkpoint(loop):
            interrupted = loop(interrupt)
        taken = max(1, engine.steps_done - loop.first + 1)
        held.write(loop.traffic.collectives, loop.idle_s / taken)
    if profiler is not None and (profile := profiler.finish(folder)) is not None:
        progress.say(f"profile of steps {t.profile}: {profile}; open it at ui.perfetto.dev")
    drawing = (
        recorder.finish(folder, console.width, console.color_system is not None)
        if recorder is not None
        else None
    )
    if drawing is not None:
        console.print(drawing, soft_wrap=True)
    total_s, speaks = time.perf_counter() - began, rank == 0 and engine.replicas.leads
    summary = run_summary(run, loop, interrupted, total_s, speaks, compare)
    progress.table(summary)
    events.writes = speaks
    ended: RunEvent = "stopped" if "stopped" in summary else "finished"
    events.add(ended, engine.steps_done, summary.get("stopped", ""), summary)
    if text is not None and not interrupted:
        context = len(first_samples(dataset, 1)[0]["input_ids"])
        written = sample_text(run, engine, text, context)
        progress.say(f"\n{written}")
        if rank == 0 and engine.replicas.leads:
            replace_file(folder / SAMPLE, written)
    engine.leave()
    return interrupted


# ---- what a run is made of -----------------------------------------------------------------------


def _weights_dtype(run: RunConfig) -> torch.dtype:
    return torch.float64 if run.precision.compute == "fp64" else torch.float32


def _engine(
    run: RunConfig,
    model: nn.Module,
    plan: Plan,
    sample: dict[str, Tensor],
    company: ReplicaGroup | None,
) -> TrainingEngine:
    made = (
        partial(Remote, workers=run.workers)
        if run.workers
        else partial(Engine, sample=sample, company=company, compile=run.train.compile_options)
    )
    return made(
        model,
        plan,
        optimizer=build.build_optimizer(run),
        loss=build.build_loss(run),
        inputs=build.model_inputs(run, model),
        clip=run.train.clip,
        skip=run.train.skip,
        seed=run.train.seed,
    )


def _loader(
    run: RunConfig,
    engine: TrainingEngine,
    dataset: Dataset | Stream,
    position: str | None = None,
    start: int = 0,
    shares: int = 1,
    validates: bool = False,
) -> AnyLoader:
    """`shares`: a replica that evaluates alone takes a batch in so many parts. `validates`: in no
    order that training asks for. A block of a shuffled stream would be read for each validation."""
    t, rank, size = run.train, engine.data_rank, engine.data_size
    buffer, pool = (0, 0) if validates else (run.data.shuffle_buffer, run.data.group_by_length)
    if shares > 1:
        rank, size = engine.plan.layout.index(engine.mesh.rank, *DATA_AXES), engine.plan.data_size
    return make_loader(
        dataset,
        t.batch // shares,
        t.seed,
        buffer,
        accumulate=t.accumulate,
        data_rank=rank,
        data_size=size,
        start=start,
        position=position,
        collate_fn=build_data.build_collate(run),
        group_by_length=pool,
    )


# ---- what is printed -----------------------------------------------------------------------------
