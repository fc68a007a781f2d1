"""The loop over steps: train, evaluate, save, watch, roll back, stop."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint import (
    CHECKPOINTS,
    AsyncCheckpointer,
    Retention,
    describe_origin,
    fill_engine,
    latest_step,
)
from weft.core import CheckpointError, LocalShard, OutlierFilter, RunConfig, WeftError
from weft.engine import StepResult, TrainingEngine, WeightAverage
from weft.launch import Watchdog

from . import build, build_data
from .best_checkpoint import BestCheckpoint
from .callbacks import Callbacks
from .comm_metrics import CommMetrics, RpcMetrics, comm_metrics_of
from .expert_metrics import ExpertMetrics
from .gpu_use import GpuUse
from .metrics import Line, Metrics, StepTimer, WaitTimer, highest_over_ranks, peak_memory_bytes
from .prefetch import Prefetcher
from .progress import Progress
from .rank_record import RankRecord
from .rank_times import RankTimes
from .run_events import RunEvent, RunEvents
from .run_folder import (
    DATA,
    LEFT_OUT,
    LOSSES,
    OPTIMIZER,
    checkpoint_folder,
    data_position,
    loop_state,
    optimizer_name,
)
from .step_profiler import StepRecorder, recorded
from .stop_request import StopRequest
from .stream_loader import AnyLoader
from .token_rows import refuse_unknown_tokens
from .trace_recorder import TraceRecorder
from .validation import Validation

# (run, device, measured seconds of a step) -> lines of the summary
Compare = Callable[[RunConfig, torch.device, float], dict[str, str]]


MOST_LEFT_OUT = 10  # in a row, before it is no accident


MOST_BACK = 3  # to one checkpoint

FINISH_S = 300.0  # for a checkpoint that is being written when a step fails


@dataclass
class TrainLoop:
    """The steps of one run, and what was last seen of them."""

    run: RunConfig
    engine: TrainingEngine
    loader: AnyLoader | Prefetcher
    validation: Validation | None
    counted: tuple[str, int]  # what a rate counts, and how many of it a step has
    metrics: Metrics | None
    progress: Progress
    watchdog: Watchdog
    callbacks: Callbacks
    events: RunEvents
    held: RankRecord
    recorder: TraceRecorder | None = None
    average: WeightAverage | None = None
    recorders: Sequence[StepRecorder] = ()
    samples: int | None = None  # of a map-style dataset
    loss: float | None = None  # of the last step that was taken
    left_out: int = 0  # steps in a row
    skipped: Counter[str] = field(default_factory=Counter)  # steps of this run, by the reason
    factor: float = 1.0  # of the learning rates, in the last step
    val_loss: float | None = None
    passed: int = 0  # batches that are left out for good, so that each step's is so many further on
    back: tuple[int, int] = (-1, 0)  # the checkpoint that it last went back to, and how often
    members: tuple[int, ...] = ()  # replicas that took part when it was last logged
    first: int = field(init=False)  # the number of the first step that is taken
    saver: AsyncCheckpointer = field(default_factory=AsyncCheckpointer)
    spikes: OutlierFilter = field(init=False)
    traffic: CommMetrics | RpcMetrics = field(init=False)
    gates: ExpertMetrics = field(init=False)
    own: RankTimes = field(init=False)
    best: BestCheckpoint = field(init=False)
    gpu: GpuUse = field(init=False)
    clock: StepTimer = field(default_factory=StepTimer)
    reading: WaitTimer = field(default_factory=WaitTimer)
    paces: list[float] = field(default_factory=list)  # seconds of a step, of each line
    idle_s: float = 0.0  # in steps, for other stages

    def __post_init__(self) -> None:
        self.first = self.engine.steps_done + 1
        self.traffic = comm_metrics_of(self.engine)
        self.gates = ExpertMetrics(self.engine)
        self.own = RankTimes(self.run, self.engine, self.callbacks)
        self.gpu = GpuUse(self.engine.mesh.device)
        self.spikes = OutlierFilter(self.run.train.rollback)
        self.best = BestCheckpoint(self.run.checkpoint.keep_best)

    def __call__(self, interrupt: StopRequest) -> bool:
        """Take all steps that are left; whether it was interrupted before the last."""
        t, save = self.run.train, self.run.checkpoint
        factor = build.build_lr_factor(self.run)
        rates = [(group, group["lr"]) for group in self.engine.optimizer.param_groups]
        recent: list[StepResult] = []  # since the last logged step
        unread: list[StepResult] = []  # read together, so that few wait for the device
        if self.engine.replicas.caught_up and self._evaluates(self.first - 1):
            self._evaluate(self.first - 1)  # the others do so now
        while self.engine.steps_done < t.steps:
            step = self.engine.steps_done + 1
            self.loader.step = step - 1 + self.passed
            self.factor = factor(step - 1)
            for group, rate in rates:  # each group has a rate of its own
                group["lr"] = rate * self.factor
            with self.reading, self.watchdog.rare():
                batch = build_data.cast_batch(self.run, next(self.loader))
            if self.recorder is not None:
                self.recorder.before(step - self.first + 1)
            idle_s = self.engine.waited_s
            around = recorded((*self.recorders, self.own), step)
            with around, self.traffic.step(), refuse_unknown_tokens(self.engine, batch):
                unread.append(self.engine.step(batch))
            recent.append(unread[-1])
            if self.average is not None and not unread[-1].skipped:
                self.average.update()
            self.idle_s += self.engine.waited_s - idle_s
            if self.recorder is not None:
                self.recorder.after()
            if self.engine.steps_done != step:
                step = self.engine.steps_done  # it has caught up with replicas that are further
                recent, unread = recent[-1:], unread[-1:]
            self.progress.step(step)
            self.watchdog.beat(f"step {step}")
            if step == self.first:
                self.held.write(self.traffic.collectives, self.idle_s)
            last = step == t.steps
            stop = interrupt.any_rank_stopped() and not last
            log = stop or last or step == self.first or step % t.log_every == 0
            evaluate = self._evaluates(step) and not stop
            keep = stop or (save.every > 0 and (last or step % save.every == 0))
            spike = None
            if log or evaluate or keep:
                spike = self._read(step, unread)
                unread.clear()
            if spike is not None:
                recent.clear()
                _drop_measured(self)
                with self.clock.pause():
                    self._go_back(step, spike)
                if stop:
                    return True
                continue
            line, result = None, recent[-1]
            if log:
                line = self._log(step, recent)
                recent.clear()
            replicas = self.engine.replicas
            with self.clock.pause():
                fit = True
                if stop or last or (keep and (replicas.leads or replicas.exchanges_weights)):
                    fit = self.engine.gather(last=stop or last)
                self.callbacks.step_end(result, line)
                if evaluate:
                    keep |= self.best.improves(step, self._evaluate(step))
                ends = (log or keep or self._validated(step)) and self.callbacks.ends()
                if ends and not (stop or last):
                    keep, fit = True, self.engine.gather(last=True)
                if keep and fit:
                    # of replicas that step by themselves another may be the one that saves next
                    self._save(step, wait=stop or last or ends or replicas.independent)
            self.callbacks.raise_failed()
            if stop or ends:
                return stop
        return False

    def _evaluates(self, step: int) -> bool:
        """Whether this rank takes part in a validation after this step."""
        replicas = self.engine.replicas  # a server's weights are all's
        mine = not replicas.servers_update or replicas.index == 0
        return mine and self.validation is not None and self._validated(step)

    def _validated(self, step: int) -> bool:
        t = self.run.train
        return bool(t.eval_every) and (step == t.steps or step % t.eval_every == 0)

    def _read(self, step: int, unread: Sequence[StepResult]) -> str | None:
        """Wait for this step, the last of `unread`, and go on from none whose loss or gradient is
        not finite, unless it was left out. What is said of a step that is to be undone."""
        losses: list[float] = torch.stack([result.loss for result in unread]).tolist()
        for number, (loss, result) in enumerate(
            zip(losses, unread, strict=True), step - len(unread) + 1
        ):
            norm = float("nan") if result.grad_norm is None else float(result.grad_norm)
            scaled = self.run.precision.compute == "fp16" and not math.isfinite(
                norm
            )  # a matter of the loss scale
            left_out = result.skipped and self.run.train.skip is not None and not scaled
            self.left_out = self.left_out + 1 if left_out else 0
            if result.skipped:
                why = "left out by train.skip" if left_out else "whose gradients overflowed in fp16"
                self.skipped[why] += 1
            if left_out:
                self._tell("left_out", number, f"left out: a gradient of norm {norm:.3g}")
            if self.left_out == MOST_LEFT_OUT:
                problem = (
                    f"{MOST_LEFT_OUT} steps in a row, the last one {number}, had gradients that"
                    " were left out"
                )
                raise WeftError(
                    f"{problem} (train.skip = {self.run.train.skip:g}). {_advice(self.run)}"
                )
            if left_out:
                continue
            spike = self.spikes.reject(loss)
            if spike is not None:
                return f"the loss of step {number} {spike}"
            if not math.isfinite(loss):
                raise WeftError(f"the loss of step {number} is {loss}. {_advice(self.run)}")
            if (
                result.grad_norm is not None
                and not result.skipped
                and not math.isfinite(result.grad_norm)
            ):
                raise WeftError(
                    f"the norm of step {number}'s gradient is {float(result.grad_norm)}."
                    f" {_advice(self.run)}"
                )
            self.loss = loss
        return None

    def _go_back(self, step: int, why: str) -> None:
        """Undo the steps since the latest checkpoint, and leave their samples out."""
        self.saver.wait()
        folder = checkpoint_folder(self.run)
        kept = latest_step(folder)
        if kept is None:
            raise WeftError(f"{why}. {_advice(self.run)}")
        self.back = kept, (self.back[1] if self.back[0] == kept else 0) + 1
        if self.back[1] > MOST_BACK:
            raise WeftError(
                f"{why}, after going back to step {kept} {MOST_BACK} times. {_advice(self.run)}"
            )
        self.engine.optimizer.state.clear()  # it is made anew, as of the checkpoint
        scalars = fill_engine(self.average or self.engine, folder, kept)
        self.passed += step - kept
        self.spikes.restore(loop_state(scalars)[1])
        self.best.restore(scalars)
        if self.metrics is not None:
            self.metrics.back_to(kept)
        self.callbacks.rolled_back(kept)
        batches = f"{step - kept} batches are" if step - kept > 1 else "1 batch is"
        self._tell("rolled_back", step, f"{why}: back to step {kept}, {batches} left out")

    def _log(self, step: int, recent: Sequence[StepResult]) -> Line:
        """Write and show a line about this step, the last of `recent`."""
        self.paces.append(step_s := self.clock.lap() / len(recent))
        line: dict[str, Any] = {
            "step": step,
            **({"loss": self.loss} if self.loss is not None else {}),  # none has been taken yet
            "lr": float(self.engine.optimizer.defaults["lr"]) * self.factor,
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
            "data_wait_s": self.reading.lap() / len(recent),
            "memory_bytes": highest_over_ranks(peak_memory_bytes(self.engine.mesh.device)),
            "epoch": round(self.loader.epoch(step + self.passed), 4),
            **self.gpu.line(),
        } | self.traffic.line(len(recent))
        experts, warnings = self.gates.line(
            len(recent), float(torch.stack([r.weight for r in recent]).sum())
        )
        own, slow = self.own.line(len(recent), step_s, line["data_wait_s"])
        line |= experts | own
        members = self.engine.replicas.members
        if members:
            line["replicas"] = len(members)
            if self.members not in ((), members):
                which = ", ".join(map(str, members))
                warnings.append(f"now these replicas take part: {which}")
        self.members = members
        for said in (*warnings, *slow):
            self._tell("warning", step, said)
        if self.metrics is not None:
            self.progress.speaks = leads = self.engine.replicas.leads
            self.metrics.write(line, leads)
        self.progress.log(line)
        return line

    def _tell(self, event: RunEvent, step: int, text: str) -> None:
        """Print what has happened, and add it to the events of the run."""
        self.progress.say(f"step {step}/{self.run.train.steps}  {text}")
        self.events.writes = self.metrics is not None and self.engine.replicas.leads
        self.events.add(event, step, text)

    def _evaluate(self, step: int) -> float:
        """Validate, and return the validation loss."""
        assert self.validation is not None
        line = self.validation(step)
        self.val_loss = line["val_loss"]
        if not math.isfinite(self.val_loss):
            raise WeftError(
                f"the validation loss after step {step} is {self.val_loss}. {_advice(self.run)}"
            )
        line = {"step": step, **line}
        if self.metrics is not None:
            self.metrics.write(line, self.engine.replicas.leads)
        others = [f"  {k[4:]} {v:.4f}" for k, v in line.items() if k not in ("step", "val_loss")]
        self.progress.say(
            f"step {step}/{self.run.train.steps}  validation loss {self.val_loss:.4f}"
            + "".join(others)
        )
        self.callbacks.validation_end(line)
        return self.val_loss

    def _save(self, step: int, wait: bool) -> None:
        """A checkpoint, written beside the next steps unless one is to `wait` for it; never of
        weights that would be of no use in place of older ones that are."""
        if self.engine.replicas.servers_update and not self.engine.replicas.leads:
            return  # the first replica has all that servers have
        leads = bool(highest_over_ranks(int(self.engine.replicas.leads)))  # rank 0 knows it best
        names, c = self.engine.params.keys(), self.run.checkpoint
        with _of_this_replica(self.engine.replicas.independent), self.watchdog.rare():
            self.saver.save(
                checkpoint_folder(self.run, None if leads else self.engine.replicas.index),
                step,
                (self.average or self.engine).tensors(),
                {
                    **self.engine.scalars(),
                    **data_position(self.run, self.samples),
                    OPTIMIZER: optimizer_name(self.run),
                    LEFT_OUT: self.passed,
                    LOSSES: [*self.spikes.recent],
                    **self.best.scalars(),
                    **({} if (position := self.loader.position()) is None else {DATA: position}),
                },
                describe_origin(self.engine.global_plan),
                Retention(c.keep, c.keep_every, self.best.steps()),
                partial(_why_useless, self.run, step, names),
            )
            if wait:
                self.saver.wait()
        self.watchdog.beat(f"the checkpoint of step {step}")
        self.callbacks.checkpoint_saved(step)


@contextmanager
def finishing_checkpoint(loop: TrainLoop) -> Iterator[None]:
    """Where a step fails in this context, the checkpoint that is being written is finished first:
    other ranks, which write their part of it, end with this one."""
    try:
        yield
    except Exception:
        with loop.watchdog.rare():
            loop.saver.finish(FINISH_S)
        raise


def _drop_measured(loop: TrainLoop) -> None:
    """Drop what was measured since the last line, of steps that are to be undone."""
    loop.clock.lap()
    loop.reading.lap()
    loop.traffic.line(1)
    loop.gates.drop()
    loop.own.drop()


@contextmanager
def _of_this_replica(independent: bool) -> Iterator[None]:
    """Where replicas step by themselves, what one cannot write is its end, and not the run's."""
    try:
        yield
    except CheckpointError as error:
        if not independent:
            raise
        raise WeftError(str(error)) from error


def _why_useless(
    run: RunConfig, step: int, names: Collection[str], pieces: Sequence[LocalShard]
) -> str | None:
    """Why shards of a checkpoint, with weights of these names, are not to be saved."""
    weights = (p.tensor for p in pieces if p.name in names and not p.tensor.is_meta)
    if all(bool(weight.isfinite().all()) for weight in weights):
        return None
    return f"a weight after step {step} is not finite. {_advice(run)}"


def _advice(run: RunConfig) -> str:
    kept = latest_step(Path(run.output) / CHECKPOINTS)
    kept_text = (
        "No checkpoint was written"
        if kept is None
        else f"The latest checkpoint is that of step {kept}"
    )
    return (
        f"{kept_text}. Try a lower optimizer.lr, a train.clip, a longer train.warmup, or"
        " train.skip."
    )
