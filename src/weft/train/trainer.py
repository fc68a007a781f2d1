"""The training loop: what every rank of `weft train` runs, in a process group of as many ranks as
the layout has."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch
import torch.distributed as dist
from rich.console import Console
from rich.filesize import decimal

from weft.checkpoint import (
    CHECKPOINTS,
    AsyncCheckpointer,
    Retention,
    latest_step,
    load_checkpoint,
    read_index,
)
from weft.core import (
    DRIVER,
    CheckpointError,
    ConfigError,
    LocalShard,
    RunConfig,
    WeftError,
    dump_toml,
    short_number,
)
from weft.engine import Engine, Remote, ReplicaGroup, StepResult, TrainingEngine
from weft.launch import AGENT, on_stop_signal, replica_slot, rpc_session
from weft.parallel import (
    DATA_AXES,
)

from . import build
from .comm_metrics import CommMetrics, RpcMetrics, comm_metrics_of
from .data import Dataset, Loader, NoDataset
from .expert_metrics import ExpertMetrics
from .generate import sample_text, text_coder
from .loss_spikes import LossSpikeDetector
from .metrics import Metrics, StepTimer, highest_over_ranks, peak_memory_bytes, rate_unit
from .progress import Progress
from .run_folder import (
    SAMPLE,
    check_output,
    checkpoint_folder,
    data_position,
    put_file,
    resume_folder,
)
from .trace_recorder import FIRST, TraceRecorder
from .watchdog import Watchdog

# (run, device, measured seconds of a step) -> lines of the summary
Compare = Callable[[RunConfig, torch.device, float], dict[str, str]]


def train(
    run: RunConfig,
    resume: bool,
    trace: bool = False,
    again: bool = False,
    asked: RunConfig | None = None,
    compare: Compare | None = None,
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

    Returns:
        Whether steps are left to take.

    Raises:
        Refusal: The run cannot be trained as it is.
        WeftError: The loss or a weight is no longer finite.
    """
    with rpc_session((DRIVER, *run.workers)) if run.workers else nullcontext():
        return _train(run, resume, trace, again, asked or run, compare)


def _train(
    run: RunConfig,
    resume: bool,
    trace: bool,
    again: bool,
    asked: RunConfig,
    compare: Compare | None,
) -> bool:
    began, t, folder, company = time.perf_counter(), run.train, Path(run.output), replica_slot()
    if not again and (
        company is None or not company.incarnation
    ):  # else others have written there meanwhile
        check_output(run, resume)
    if dist.is_initialized():
        dist.barrier()  # no rank may find what rank 0 has written already
    rank = dist.get_rank() if dist.is_initialized() else 0
    reads = not (run.workers and rank)  # workers need no data
    dataset = build.build_dataset(run) if reads else NoDataset(t.batch)
    val = build.build_dataset(run, "val") if t.eval_every and reads else None
    text = text_coder(run, dataset) if t.sample_tokens and reads else None
    engine = _engine(run, dataset, company)
    shares = (
        engine.global_plan.layout.replica_count if engine.replicas.servers_update else 1
    )  # replicas are never at one step
    val_loader = _loader(run, engine, val, shares=shares) if val is not None else None
    scalars: dict[str, Any] = {}
    notes = [*engine.global_plan.notes]
    if resume and not engine.replicas.caught_up:
        found = resume_folder(run, engine.replicas.index)
        scalars = _restore(engine, found, None)
    engine.connect()
    done = engine.steps_done
    if engine.codec_state_lost:
        notes.append("what codecs had kept was another layout's or codec's: it begins anew")
    if trace and t.steps - done < FIRST:
        problem = (
            f"leaves {t.steps - done} steps to take, and the first to be traced is number {FIRST}"
        )
        raise ConfigError(
            "train.steps", t.steps, problem, f"use at least {done + FIRST}, or leave --trace out"
        )
    left_out = int(scalars.get(LEFT_OUT, 0))
    loader = _loader(run, engine, dataset, start=done + left_out)
    if rank == 0 and engine.replicas.leads:
        put_file(folder / "run.toml", dump_toml(asked))
        put_file(folder / "plan.txt", f"{engine.global_plan}\n")

    console = Console(quiet=rank != 0 or not engine.replicas.leads)
    recorder = (
        TraceRecorder(engine)
        if trace and engine.replicas.leads and isinstance(engine, Engine)
        else None
    )
    progress = Progress(console, t.steps, done)
    progress.table(_header(run, engine, done, notes))
    # of replicas that are apart the one that leads writes, and another may lead later
    writer = Metrics(folder, done, engine.replicas.leads) if rank == 0 else nullcontext()
    with writer as metrics, StopRequest() as interrupt, progress, Watchdog(t.hang_s) as watchdog:
        loop = _Loop(
            run,
            engine,
            loader,
            val_loader,
            rate_unit(dataset[0], t.batch),
            metrics,
            progress,
            watchdog,
            recorder,
            shares=shares,
            passed=left_out,
        )
        loop.spikes.remember(scalars.get(LOSSES, ()))
        if isinstance(engine, Remote):
            engine.heard = partial(
                watchdog.beat, "a call"
            )  # while the driver validates a worker takes no steps
        interrupted = loop(interrupt)
    drawing = (
        recorder.finish(folder, console.width, console.color_system is not None)
        if recorder is not None
        else None
    )
    if drawing is not None:
        console.print(drawing, soft_wrap=True)
    progress.table(
        _summary(
            run,
            loop,
            interrupted,
            time.perf_counter() - began,
            rank == 0 and engine.replicas.leads,
            compare,
        )
    )
    if text is not None and not interrupted:
        written = sample_text(run, engine, text, len(dataset[0]["input_ids"]))
        progress.say(f"\n{written}")
        if rank == 0 and engine.replicas.leads:
            put_file(folder / SAMPLE, written)
    engine.leave()
    return interrupted


MOST_LEFT_OUT = 10  # in a row, before it is no accident
MOST_BACK = 3  # to one checkpoint
LEFT_OUT, LOSSES = "batches_left_out", "losses"


@dataclass
class _Loop:
    """The steps of one run, and what was last seen of them."""

    run: RunConfig
    engine: TrainingEngine
    loader: Loader
    val_loader: Loader | None
    counted: tuple[str, int]  # what a rate counts, and how many of it a step has
    metrics: Metrics | None
    progress: Progress
    watchdog: Watchdog
    recorder: TraceRecorder | None = None
    loss: float | None = None  # of the last step that was taken
    left_out: int = 0  # steps in a row
    val_loss: float | None = None
    passed: int = 0  # batches that are left out for good, so that each step's is so many further on
    back: tuple[int, int] = (-1, 0)  # the checkpoint that it last went back to, and how often
    shares: int = 1  # into which a validation batch is divided, one after the other
    members: tuple[
        int, ...
    ] = ()  # replicas that took part when it was last logged, where some may be left out
    first: int = field(init=False)  # the number of the first step that is taken
    saver: AsyncCheckpointer = field(default_factory=AsyncCheckpointer)
    spikes: LossSpikeDetector = field(init=False)
    traffic: CommMetrics | RpcMetrics = field(init=False)
    gates: ExpertMetrics = field(init=False)
    clock: StepTimer = field(default_factory=StepTimer)
    paces: list[float] = field(default_factory=list)  # seconds of a step, of each line
    idle_s: float = 0.0  # in steps, for other stages

    def __post_init__(self) -> None:
        self.first = self.engine.steps_done + 1
        self.traffic = comm_metrics_of(self.engine)
        self.gates = ExpertMetrics(self.engine)
        self.spikes = LossSpikeDetector(self.run.train.rollback)

    def __call__(self, interrupt: StopRequest) -> bool:
        """Take all steps that are left; whether it was interrupted before the last."""
        t, save = self.run.train, self.run.checkpoint
        factor = build.build_lr_factor(self.run)
        groups = self.engine.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        recent: list[
            StepResult
        ] = []  # since the last logged step; read together, so that few wait for the device
        if self.engine.replicas.caught_up and self._evaluates(self.first - 1):
            self._evaluate(self.first - 1)  # the others do so now
        while self.engine.steps_done < t.steps:
            step = self.engine.steps_done + 1
            self.loader.step = step - 1 + self.passed
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * factor(step - 1)
            batch = build.cast_batch(self.run, next(self.loader))
            if self.recorder is not None:
                self.recorder.before(step - self.first + 1)
            idle_s = self.engine.waited_s
            with self.traffic.step():
                recent.append(self.engine.step(batch))
            self.idle_s += self.engine.waited_s - idle_s
            if self.recorder is not None:
                self.recorder.after()
            if self.engine.steps_done != step:
                step = self.engine.steps_done  # it has caught up with replicas that are further
                recent = recent[-1:]
            self.progress.step(step)
            self.watchdog.beat(f"step {step}")
            last = step == t.steps
            stop = interrupt.agreed() and not last
            log = stop or last or step == self.first or step % t.log_every == 0
            evaluate = self._evaluates(step) and not stop
            keep = stop or (save.every > 0 and (last or step % save.every == 0))
            spike = self._read(step, recent) if log or evaluate or keep else None
            if spike is not None:
                self._go_back(step, spike)
                recent.clear()
                if stop:
                    return True
                continue
            if log:
                self._log(step, recent)
                recent.clear()
            replicas = self.engine.replicas
            with self.clock.pause():
                fit = True
                if stop or last or (keep and (replicas.leads or replicas.exchanges_weights)):
                    fit = self.engine.gather(last=stop or last)
                if evaluate:
                    self._evaluate(step)
                if keep and fit:
                    # of replicas that step by themselves another may be the one that saves next
                    self._save(step, wait=stop or last or replicas.independent)
            if stop:
                return True
        return False

    def _evaluates(self, step: int) -> bool:
        t, mine = (
            self.run.train,
            not self.engine.replicas.servers_update or self.engine.replicas.index == 0,
        )  # a server's weights are all's
        return (
            mine and self.val_loader is not None and (step == t.steps or step % t.eval_every == 0)
        )

    def _read(self, step: int, recent: Sequence[StepResult]) -> str | None:
        """Wait for this step, the last of `recent`, and go on from none whose loss or gradient is
        not finite, unless it was left out. What is said of a step that is to be undone."""
        losses: list[float] = torch.stack([result.loss for result in recent]).tolist()
        for number, (loss, result) in enumerate(
            zip(losses, recent, strict=True), step - len(recent) + 1
        ):
            norm = float("nan") if result.grad_norm is None else float(result.grad_norm)
            scaled = self.run.precision.compute == "fp16" and not math.isfinite(
                norm
            )  # a matter of the loss scale
            left_out = result.skipped and self.run.train.skip is not None and not scaled
            self.left_out = self.left_out + 1 if left_out else 0
            if left_out:
                self.progress.say(
                    f"step {number}/{self.run.train.steps}  left out: a gradient of norm {norm:.3g}"
                )
            if self.left_out == MOST_LEFT_OUT:
                problem = (
                    f"{MOST_LEFT_OUT} steps in a row, the last one {number}, had gradients that"
                    " were left out"
                )
                raise WeftError(
                    f"{problem} (train.skip = {self.run.train.skip:g}). {self._advice()}"
                )
            if left_out:
                continue
            spike = self.spikes.judge(loss)
            if spike is not None:
                return f"the loss of step {number} {spike}"
            if not math.isfinite(loss):
                raise WeftError(f"the loss of step {number} is {loss}. {self._advice()}")
            if (
                result.grad_norm is not None
                and not result.skipped
                and not math.isfinite(result.grad_norm)
            ):
                raise WeftError(
                    f"the norm of step {number}'s gradient is {float(result.grad_norm)}."
                    f" {self._advice()}"
                )
            self.loss = loss
        return None

    def _go_back(self, step: int, why: str) -> None:
        """Undo the steps since the latest checkpoint, and leave their samples out."""
        self.saver.wait()
        folder = checkpoint_folder(self.run)
        kept = latest_step(folder)
        if kept is None:
            raise WeftError(f"{why}. {self._advice()}")
        self.back = kept, (self.back[1] if self.back[0] == kept else 0) + 1
        if self.back[1] > MOST_BACK:
            raise WeftError(
                f"{why}, after going back to step {kept} {MOST_BACK} times. {self._advice()}"
            )
        self.engine.optimizer.state.clear()  # it is made anew, as of the checkpoint
        scalars = _restore(self.engine, folder, kept)
        self.passed += step - kept
        self.spikes.remember(scalars.get(LOSSES, ()))
        if self.metrics is not None:
            self.metrics.back_to(kept)
        batches = f"{step - kept} batches are" if step - kept > 1 else "1 batch is"
        self.progress.say(
            f"step {step}/{self.run.train.steps}  {why}: back to step {kept}, {batches} left out"
        )

    def _log(self, step: int, recent: Sequence[StepResult]) -> None:
        """Write and show a line about this step, the last of `recent`."""
        step_s = self.clock.lap() / len(recent)
        self.paces.append(step_s)
        line: dict[str, Any] = {
            "step": step,
            **({"loss": self.loss} if self.loss is not None else {}),  # none has been taken yet
            "lr": float(self.engine.optimizer.param_groups[0]["lr"]),
        }
        if recent[-1].grad_norm is not None and not recent[-1].skipped:
            line["grad_norm"] = float(recent[-1].grad_norm)
        if self.passed:
            line[LEFT_OUT] = self.passed
        if skipped := sum(result.skipped for result in recent):
            line["skipped"] = skipped
        name, count = self.counted
        line |= {
            f"{name}_per_s": count / step_s,
            "step_s": step_s,
            "memory_bytes": highest_over_ranks(peak_memory_bytes(self.engine.mesh.device)),
            "epoch": round((step + self.passed) / self.loader.steps_per_epoch, 4),
        } | self.traffic.line(len(recent))
        experts, warnings = self.gates.line(
            len(recent), float(torch.stack([r.weight for r in recent]).sum())
        )
        line |= experts
        for warning in warnings:
            self.progress.say(f"step {step}/{self.run.train.steps}  {warning}")
        members = self.engine.replicas.members
        if members:
            line["replicas"] = len(members)
            if self.members not in ((), members):
                which = ", ".join(map(str, members))
                self.progress.say(
                    f"step {step}/{self.run.train.steps}  now these replicas take part: {which}"
                )
        self.members = members
        if self.metrics is not None:
            self.progress.speaks = self.engine.replicas.leads
            if self.engine.replicas.leads:
                self.metrics.write(line)
        self.progress.log(line)

    def _evaluate(self, step: int) -> None:
        """The mean loss of the validation batches, the same ones each time, over all that counts in
        them."""
        assert self.val_loader is not None
        loader = self.val_loader
        loader.step = 0
        results = []
        for number in range(min(self.run.train.eval_batches * self.shares, loader.steps_per_epoch)):
            results.append(self.engine.evaluate(build.cast_batch(self.run, next(loader))))
            self.watchdog.beat(f"batch {number + 1} of the validation after step {step}")
        weights = torch.stack([r.weight for r in results])
        self.val_loss = float(
            (torch.stack([r.loss for r in results]) * weights).sum() / weights.sum()
        )
        if not math.isfinite(self.val_loss):
            raise WeftError(
                f"the validation loss after step {step} is {self.val_loss}. {self._advice()}"
            )
        if self.metrics is not None and self.engine.replicas.leads:
            self.metrics.write({"step": step, "val_loss": self.val_loss})
        self.progress.say(
            f"step {step}/{self.run.train.steps}  validation loss {self.val_loss:.4f}"
        )

    def _save(self, step: int, wait: bool) -> None:
        """A checkpoint, written beside the next steps unless one is to `wait` for it; never of
        weights that would be of no use in place of older ones that are."""
        if self.engine.replicas.servers_update and not self.engine.replicas.leads:
            return  # the first replica has all that servers have
        leads = bool(
            highest_over_ranks(int(self.engine.replicas.leads))
        )  # the first rank knows it best
        names, c = self.engine.params.keys(), self.run.checkpoint

        def useless(pieces: Sequence[LocalShard]) -> str | None:
            weights = (p.tensor for p in pieces if p.name in names and not p.tensor.is_meta)
            if all(bool(weight.isfinite().all()) for weight in weights):
                return None
            return f"a weight after step {step} is not finite. {self._advice()}"

        with self._of_this_replica():
            self.saver.save(
                checkpoint_folder(self.run, None if leads else self.engine.replicas.index),
                step,
                self.engine.tensors(),
                {
                    **self.engine.scalars(),
                    **data_position(self.run),
                    LEFT_OUT: self.passed,
                    LOSSES: [*self.spikes.recent],
                },
                {
                    "layout": str(self.engine.global_plan.layout),
                    "weft": _version(),
                    "torch": torch.__version__,
                },
                Retention(c.keep, c.keep_every),
                useless,
            )
            if wait:
                self.saver.wait()
        self.watchdog.beat(f"the checkpoint of step {step}")

    @contextmanager
    def _of_this_replica(self) -> Iterator[None]:
        """Where replicas step by themselves, what one cannot write is its own end, and not the
        run's."""
        try:
            yield
        except CheckpointError as error:
            if not self.engine.replicas.independent:
                raise
            raise WeftError(str(error)) from error

    def _advice(self) -> str:
        kept = latest_step(Path(self.run.output) / CHECKPOINTS)
        kept_text = (
            "No checkpoint was written"
            if kept is None
            else f"The latest checkpoint is that of step {kept}"
        )
        return (
            f"{kept_text}. Try a lower optimizer.lr, a train.clip, a longer train.warmup, or"
            " train.skip."
        )


class StopRequest:
    """What a run is told to stop by (`launch.signals`), on which all ranks act after the same
    step."""

    def __init__(self) -> None:
        self._asked = False
        self._flag = torch.zeros(1)
        self._work: dist.Work | None = None

    def agreed(self) -> bool:
        """Whether any rank had got the signal when it last called this. Called by all ranks after
        every step.

        One number is reduced on the CPU while the next step runs, so the answer is a step late and
        no device waits.
        """
        if not dist.is_initialized():
            return self._asked
        agreed = self._wait()
        self._flag = torch.tensor([float(self._asked)])
        self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, async_op=True)
        return agreed

    def _wait(self) -> bool:
        if self._work is not None:
            self._work.wait()
        return bool(self._flag)

    def _ask(self) -> None:
        self._asked = True

    def __enter__(self) -> Self:
        self._hearing = on_stop_signal(self._ask)
        self._hearing.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._hearing.__exit__(None, None, None)
        if kind is None:  # after an error, peers that are gone would be waited for
            self._wait()


# ---- what a run is made of -----------------------------------------------------------------------


def _engine(run: RunConfig, dataset: Dataset, company: ReplicaGroup | None) -> TrainingEngine:
    model = build.build_model(
        run, dtype=torch.float64 if run.precision.compute == "fp64" else torch.float32
    )
    sample = build.sample_batch(run, dataset)
    made = (
        partial(Remote, workers=run.workers)
        if run.workers
        else partial(Engine, sample=sample, company=company)
    )
    return made(
        model,
        build.build_plan(run, model, sample),
        optimizer=build.build_optimizer(run),
        loss=build.build_loss(run),
        inputs=build.model_inputs(run, model),
        clip=run.train.clip,
        skip=run.train.skip,
        seed=run.train.seed,
    )


def _restore(engine: TrainingEngine, folder: Path, step: int | None) -> dict[str, Any]:
    """Fill the engine from a checkpoint; returns its scalars."""
    saved = read_index(folder, step).tensors
    scalars = load_checkpoint(folder, step, engine.tensors(saved))
    engine.load_scalars(scalars)
    return scalars


def _loader(
    run: RunConfig, engine: TrainingEngine, dataset: Dataset, start: int = 0, shares: int = 1
) -> Loader:
    """`shares`: a replica that evaluates alone takes a batch in so many parts."""
    t, rank, size = run.train, engine.data_rank, engine.data_size
    if shares > 1:
        rank, size = engine.plan.layout.index(engine.mesh.rank, *DATA_AXES), engine.plan.data_size
    batch = t.batch // shares
    return Loader(
        dataset, batch, t.seed, accumulate=t.accumulate, data_rank=rank, data_size=size, start=start
    )


def _version() -> str:
    try:
        return version("weft")
    except PackageNotFoundError:  # run from its sources
        return "not installed"


# ---- what is printed -----------------------------------------------------------------------------


def _header(
    run: RunConfig, engine: TrainingEngine, done: int, notes: Sequence[str]
) -> dict[str, str]:
    layout, count = (
        engine.global_plan.layout,
        sum(math.prod(weight.shape) for weight in engine.plan.weights),
    )
    device = engine.mesh.device
    kind = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    rows = {
        "layout": f"{layout}, {run.world} {'process' if run.world == 1 else 'processes'}",
        "model": f"{short_number(count)} parameters, {run.precision.compute}",
        "device": f"{kind} each" if run.world > 1 else kind,
        "folder": run.output,
    }
    rows |= {"note" if i == 0 else f"note {i + 1}": note for i, note in enumerate(notes)}
    return rows | ({"resumed": f"after step {done}"} if done else {})


def _summary(
    run: RunConfig,
    loop: _Loop,
    interrupted: bool,
    total_s: float,
    speaks: bool,
    compare: Compare | None,
) -> dict[str, str]:
    engine, (name, count) = loop.engine, loop.counted
    taken = engine.steps_done - loop.first + 1
    rows = {"steps": f"{engine.steps_done}/{run.train.steps}"}
    if interrupted:
        again = (
            "it goes on with the hosts that meet next"
            if os.environ.get(AGENT) == "elastic"
            else "--resume goes on"
        )
        rows["stopped"] = f"saved after step {engine.steps_done}; {again}"
    if loop.loss is not None:
        rows["loss"] = f"{loop.loss:.4f}"
    if loop.val_loss is not None:
        rows["validation"] = f"{loop.val_loss:.4f}"
    if taken:
        rows["speed"] = f"{short_number(taken * count / loop.clock.total_s)} {name}/s"
    if wire := loop.traffic.summary():
        rows["sent"] = wire
    if engine.global_plan.layout.stage_ranks > 1 and loop.idle_s:
        rows["idle"] = f"{loop.idle_s / loop.clock.total_s:.0%} of a step, waiting for other stages"
    if experts := loop.gates.summary():
        rows["experts"] = experts
    if engine.replicas.stalest is not None:
        rows["staleness"] = f"{engine.replicas.stalest} steps at most"
    rows |= {
        "time": str(timedelta(seconds=round(total_s))),
        "memory": (
            f"{decimal(highest_over_ranks(peak_memory_bytes(engine.mesh.device)))} at most on a"
            " rank"
        ),
    }
    if compare and speaks and not interrupted and isinstance(engine, Engine) and loop.paces:
        # the first step is slower
        rows |= compare(run, engine.mesh.device, median(loop.paces[1:] or loop.paces))
    return rows | {"folder": run.output}
