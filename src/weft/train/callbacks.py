"""Callbacks: code that is called while a run trains, under `weft train` and in loops of one's own.

Every rank makes its own callbacks and calls them at the same points of the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, Literal, Self

import torch.distributed as dist

from weft.core import ConfigError, WeftError, gather_json, nearest
from weft.engine import StepResult, TrainingEngine

from .metrics import Line


@dataclass
class WatchedRun:
    """The run, as a callback sees it.

    Attributes:
        engine: what trains: its model, optimizer and plan.
        steps: the step that the run ends with; None in a loop that does not say.
        folder: the run folder; None in a loop that has none.
        config: the tables of the run file, or what a loop gives in their place.
        say: prints a line, above the progress bar where there is one; on rank 0 alone.
        stop_reason: what `stop` was called with.
    """

    engine: TrainingEngine
    steps: int | None = None
    folder: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    say: Callable[[str], None] = print
    stop_reason: str | None = None

    @property
    def rank(self) -> int:
        """This process's rank."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.engine.steps_done

    def stop(self, reason: object) -> None:
        """End the run after this step, or the next one that is logged, validated or saved. One rank
        is enough."""
        said = "" if reason is None else " ".join(str(reason).split())
        self.stop_reason = self.stop_reason or said or "a callback stopped it"


class Callback:
    """What is called while a run trains: every rank calls each method that a callback has. A class
    need not derive from this one, and has the methods that it needs."""

    def check_run(self, config: Mapping[str, Any]) -> None:
        """Before any process of `weft train` starts, with the tables of the run file. Raises
        ConfigError where this callback would be of no use."""

    def on_run_begin(self, run: WatchedRun) -> None:
        """Before the first step; after a checkpoint was loaded, if the run is resumed."""

    def on_step_end(self, run: WatchedRun, result: StepResult, metrics: Line | None) -> None:
        """After every step. `metrics`: the line of metrics.jsonl where the step is logged; reading
        `result` waits for the device."""

    def on_validation_end(self, run: WatchedRun, metrics: Line) -> None:
        """After a validation: `val_loss`, and what `train.eval_metrics` names."""

    def on_checkpoint_saved(self, run: WatchedRun, step: int) -> None:
        """A checkpoint has its tensors; its files may still be being written beside the next
        steps."""

    def on_rollback(self, run: WatchedRun, step: int) -> None:
        """The weights are those after `step` again: see `train.rollback`."""

    def on_log(self, run: WatchedRun, line: Line) -> None:
        """A line of metrics.jsonl was written. Only on the rank that writes it: rank 0."""

    def on_run_end(self, run: WatchedRun) -> None:
        """After the last step, or where the run was stopped before."""

    def on_run_failed(self, run: WatchedRun, error: BaseException) -> None:
        """An error ends the run."""


METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def check_callback(callback: object, field: str, value: object) -> None:
    """Refuse an object with none of a callback's methods, with a misspelt one, or with one that
    takes other arguments. Raises ConfigError."""
    found = [name for name in dir(callback) if name.startswith("on_")]
    for name in found:
        if name not in METHODS:
            problem = f"{type(callback).__name__} has {name}, which nothing calls"
            raise ConfigError(field, value, problem, nearest(name, METHODS))
        given = signature(getattr(Callback, name)).parameters
        try:
            signature(getattr(callback, name)).bind(*[*given][1:])
        except TypeError:
            names = ", ".join(given)
            problem = f"{type(callback).__name__}.{name} does not take ({names})"
            raise ConfigError(field, value, problem, f"write def {name}({names})") from None
    if not found:
        problem = f"makes {type(callback).__name__}, which has no method of a callback"
        raise ConfigError(field, value, problem, f"write one of {', '.join(METHODS)}")


class Callbacks:
    """The callbacks of one run, called in their order.

    What a callback raises is kept until `ends`: then all ranks end with one error that names the
    callback, and whoever trains can save before. A callback that has raised is not called again.

    Args:
        callbacks: objects with methods of `Callback`.
        engine: what trains.
        around: a context for calls, which may take long: `Watchdog.rare`.
        further: of `WatchedRun`: steps, folder, config, say.

    Example:
        with Callbacks([EarlyStopping("loss")], engine) as callbacks:
            for batch in loader:
                result = engine.step(batch)
                callbacks.step_end(result, {"loss": float(result.loss)})
                if callbacks.ends():
                    break
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        engine: TrainingEngine,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        **further: Any,
    ):
        for each in callbacks:
            check_callback(each, "callbacks", type(each).__name__)
        self.run, self._around = WatchedRun(engine, **further), around
        self._live, self._error = list(callbacks), ""
        # weft's own loggers end no run, and ranks need not exchange what they want; a class that
        # derives from one may end it
        self._any = any(vars(type(each)).get("can_stop", True) for each in callbacks)
        self.failed = ""  # on every rank, what a callback of one of them has raised
        self.took_s = 0.0  # in all calls so far

    def step_end(self, result: StepResult, metrics: Line | None = None) -> None:
        """A step has ended; `metrics` where it is logged."""
        self._call("on_step_end", result, metrics)

    def validation_end(self, metrics: Line) -> None:
        self._call("on_validation_end", metrics)

    def checkpoint_saved(self, step: int) -> None:
        self._call("on_checkpoint_saved", step)

    def rolled_back(self, step: int) -> None:
        self._call("on_rollback", step)

    def log(self, line: Line) -> None:
        """For loggers, which are called on rank 0 alone; the step is added."""
        if self.run.rank == 0:
            self._call("on_log", {"step": self.run.step, **line})

    def ends(self) -> bool:
        """Whether a callback of any rank wants the run to end, or has raised. All ranks call it
        together; it costs nothing where there are no callbacks."""
        if not self._any:
            return False
        found = gather_json([self._error, self.run.stop_reason])
        self.failed = next((error for error, _ in found if error), "")
        self.run.stop_reason = next((reason for _, reason in found if reason), None)
        return bool(self.failed or self.run.stop_reason)

    def raise_failed(self) -> None:
        """Raises WeftError if a callback of any rank had raised when `ends` was last called."""
        if self.failed:
            raise WeftError(self.failed)

    def __enter__(self) -> Self:
        self._call("on_run_begin")
        if self._error:
            raise WeftError(self._error)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._call("on_run_failed", error)
            if self._error not in ("", self.failed):
                self.run.say(self._error)  # the run's own error comes first
            return
        self.raise_failed()
        self._call("on_run_end")
        if self._error:
            raise WeftError(self._error)

    def _call(self, method: str, *arguments: Any) -> None:
        for callback in list(self._live):
            function = getattr(callback, method, None)
            if function is None:
                continue
            began = time.perf_counter()
            try:
                with self._around():
                    function(self.run, *arguments)
            except (Exception, SystemExit) as error:  # a user's code may fail in any way
                kind = type(callback)
                self._live.remove(callback)
                said = " ".join(f"{type(error).__name__}: {error}".split())
                where = f"rank {self.run.rank}, after step {self.run.step}"
                self._error = self._error or (
                    f"callback {kind.__module__}:{kind.__qualname__}: {method} failed on"
                    f" {where}: {said}"
                )
            self.took_s += time.perf_counter() - began


class EarlyStopping:
    """Stops a run whose metric no longer improves.

    Args:
        metric: of a validation or a logged step.
        patience: how many values in a row may be no better than the best.
        min_delta: what counts as better.
        mode: whether "min" or "max" is better.
    """

    def __init__(
        self,
        metric: str = "val_loss",
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
    ):
        if mode not in ("min", "max"):
            raise ConfigError("mode", mode, "is not known", 'write "min" or "max"')
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.sign = 1 if mode == "min" else -1
        self.best, self.worse = math.inf, 0
        self.came: set[str] = set()  # metrics

    def check_run(self, config: Mapping[str, Any]) -> None:
        every = config["train"]["eval_every"]
        if self.metric.startswith("val_") and not every:
            problem = f"EarlyStopping waits for {self.metric}, and the run has no validation"
            fix = 'set it to a number of steps, or give EarlyStopping metric = "loss"'
            raise ConfigError("train.eval_every", every, problem, fix)

    def on_step_end(self, run: WatchedRun, result: StepResult, metrics: Line | None) -> None:
        if metrics is not None:
            self._look(run, metrics)

    def on_validation_end(self, run: WatchedRun, metrics: Line) -> None:
        self._look(run, metrics)

    def on_run_end(self, run: WatchedRun) -> None:
        if self.metric not in self.came:
            hint = f": {nearest(self.metric, self.came)}" if self.came else ""
            run.say(f"no metrics had {self.metric}, so EarlyStopping never acted{hint}")

    def _look(self, run: WatchedRun, metrics: Line) -> None:
        self.came |= metrics.keys()
        if self.metric not in metrics:
            return
        value = metrics[self.metric]
        if self.sign * value < self.best - self.min_delta:
            self.best, self.worse = self.sign * value, 0
            return
        self.worse += 1
        if self.worse >= self.patience:
            times = "time" if self.worse == 1 else "times"
            run.stop(
                f"{self.metric} was no better than {self.best * self.sign:.4g} {self.worse} {times}"
            )
