"""Loggers: callbacks that send the lines of metrics.jsonl to a tracker, from a thread of their own.

A tracker that does not answer costs the training nothing: what could not be sent waits for the next
line, and after the run for a few seconds more.
"""

from __future__ import annotations

import csv
import importlib.util
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from io import StringIO
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

from weft.core import ConfigError, DataError, append_file, read_file, replace_file

from .callbacks import Line, WatchedRun
from .metrics import MOST_BYTES, MOST_KEPT
from .run_folder import CSV, TENSORBOARD

PATIENCE_S = 10.0  # for a tracker, when the run has ended
ID_BYTES = 1000  # of a file that holds a tracker's name of the run


class Logger(ABC):
    """Sends lines to a tracker, in the order in which they were written. `open`, `write`, `back_to`
    and `close` run on the logger's thread."""

    name: ClassVar[str]
    package: ClassVar[str] = ""  # that it needs
    extra: ClassVar[str] = ""  # that installs it
    # of each of weft's own, so that ranks need not exchange what their callbacks want
    can_stop: ClassVar[bool]
    run: WatchedRun

    def __init__(self) -> None:
        if self.package and importlib.util.find_spec(self.package) is None:
            fix = f'install it: pip install "weft[{self.name}]"'
            raise DataError("train.loggers", self.name, f"needs the package {self.package}", fix)
        self._events: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._problem, self._warned, self._opened = "", False, False
        self._pending: deque[dict[str, float]] = deque(maxlen=MOST_KEPT)

    @abstractmethod
    def open(self, done: int) -> None:
        """Begin, or go on after `done` steps."""

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """What was measured of a step."""

    @abstractmethod
    def back_to(self, step: int) -> None:
        """What was written past this step is to be no more, where the tracker can forget."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """The run has ended."""

    # ---- as a callback ---------------------------------------------------------------------------

    def on_run_begin(self, run: WatchedRun) -> None:
        self.run, self._done = run, run.step

    def on_log(self, run: WatchedRun, line: Line) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
            self._thread.start()
        self._events.put(("line", {k: v for k, v in line.items() if not isinstance(v, Mapping)}))
        self._warn()

    def on_rollback(self, run: WatchedRun, step: int) -> None:
        self._events.put(("back", step))

    def on_run_end(self, run: WatchedRun) -> None:
        self._finish(failed=False)

    def on_run_failed(self, run: WatchedRun, error: BaseException) -> None:
        self._finish(failed=True)

    def _finish(self, failed: bool) -> None:
        if self._thread is None:
            return
        self._events.put(("end", failed))
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive() and not self._problem:
            self._problem = f"does not answer for {PATIENCE_S:g} s after the run"
        self._warn()

    def _warn(self) -> None:
        if self._problem and not self._warned:
            self._warned = True
            self.run.say(f"{self.name}: {self._problem}; metrics.jsonl has all metrics")

    # ---- on its own thread -----------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            kind, value = self._events.get()
            if kind == "line":
                self._pending.append(value)
            elif kind == "back":
                kept = [line for line in self._pending if line["step"] <= value]
                self._pending = deque(kept, maxlen=MOST_KEPT)
            try:
                if not self._opened:
                    self.open(self._done)
                    self._opened = True
                if kind == "back":
                    self.back_to(value)
                while self._pending:
                    values = dict(self._pending[0])
                    self.write(int(values.pop("step")), values)
                    self._pending.popleft()
                if kind == "end":
                    self.close(failed=value)
            except Exception as error:  # a tracker may fail in any way
                said = " ".join(str(error).split())[:300]
                self._problem = f"{type(error).__name__}: {said}"
            if kind == "end":
                return

    # ---- the run folder --------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """The run folder. Raises ConfigError if the run has none."""
        if self.run.folder is None:
            problem, fix = f"{self.name} writes to it", 'give Callbacks a folder=Path("runs/mine")'
            raise ConfigError("folder", None, problem, fix)
        return self.run.folder

    def run_id(self) -> str | None:
        """The tracker's name of the run that goes on here."""
        path = self.folder / f"{self.name}-run"
        known = self._done and path.is_file()
        return read_file(path, ID_BYTES).decode().strip() if known else None

    def keep_run_id(self, run_id: str) -> None:
        """So that a resumed run is the same one to the tracker."""
        replace_file(self.folder / f"{self.name}-run", f"{run_id}\n")


class TensorBoard(Logger):
    """Events for TensorBoard, in the run folder."""

    name, package, extra = "tensorboard", "tensorboard", "weft[tensorboard]"
    can_stop = False
    _writer: Any = None

    def on_run_begin(self, run: WatchedRun) -> None:
        super().on_run_begin(run)
        _ = self.folder

    def open(self, done: int) -> None:
        # imported only now: the first step need not wait for it
        from torch.utils.tensorboard import SummaryWriter

        path, purge = str(self.folder / TENSORBOARD), done + 1 if done else None
        self._writer = SummaryWriter(path, purge_step=purge, flush_secs=10)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def back_to(self, step: int) -> None:
        self._writer.close()
        self.open(step)

    def close(self, failed: bool) -> None:
        self._writer.close()


class Csv(Logger):
    """metrics.csv in the run folder: a row for each line, a column for each metric."""

    name = "csv"
    can_stop = False

    def on_run_begin(self, run: WatchedRun) -> None:
        super().on_run_begin(run)
        _ = self.folder

    def open(self, done: int) -> None:
        self._path, self._columns = self.folder / CSV, ["step"]
        rows = []
        if done and self._path.is_file():
            reader = self._reader()
            if "step" in (reader.fieldnames or ()):  # else another file, which is replaced
                self._columns = list(reader.fieldnames or ())
                rows = [row for row in reader if _as_step(row["step"]) <= done]
        self._rewrite(rows)

    def _reader(self) -> csv.DictReader[str]:
        text = read_file(self._path, MOST_BYTES).decode(errors="replace")
        return csv.DictReader(StringIO(text, newline=""))

    def _rewrite(self, rows: Iterable[Mapping[str, Any]]) -> None:
        header = dict(zip(self._columns, self._columns))
        replace_file(self._path, self._text([header, *rows]))

    def _text(self, rows: Iterable[Mapping[str, Any]]) -> str:
        text = StringIO()
        csv.DictWriter(text, self._columns, lineterminator="\n").writerows(rows)
        return text.getvalue()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        new = [key for key in values if key not in self._columns]
        if new:
            rows = list(self._reader())
            self._columns += new
            self._rewrite(rows)
        append_file(self._path, self._text([{"step": step, **values}]))

    def back_to(self, step: int) -> None:
        self.open(step)

    def close(self, failed: bool) -> None:
        pass


def _as_step(text: str | None) -> float:
    """The step of a row; of one that a crash cut short more than any."""
    return int(text) if text and text.isdigit() else float("inf")


class Wandb(Logger):
    """Weights & Biases. WANDB_MODE=offline keeps all of it in the run folder.

    Args:
        project: of the tracker; default: as its own settings say.
        name: of the run; default: the run folder's.
        entity: whose project it is.
        group: which runs it belongs to.
        tags: of the run.
        mode: "online", "offline" or "disabled".
    """

    name, package, extra = "wandb", "wandb", "weft[wandb]"
    can_stop = False

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        mode: str | None = None,
    ):
        super().__init__()
        given = {"project": project, "entity": entity, "group": group, "tags": tags, "mode": mode}
        self._given, self._name = given, name

    def open(self, done: int) -> None:
        import wandb

        known = self.run_id()
        self._run = wandb.init(
            **self._given,
            name=self._name or self.folder.name,
            dir=str(self.folder),
            config=dict(self.run.config),
            id=known,
            resume="allow" if known else None,
            settings=wandb.Settings(console="off", silent=True),
        )
        self.keep_run_id(self._run.id)
        # by its own step the tracker would leave out what a rollback takes again
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def back_to(self, step: int) -> None:
        """It forgets nothing: steps that are taken again are there twice."""

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Mlflow(Logger):
    """MLflow, over a server or a local database.

    Args:
        uri: of a tracking server or a database; default: MLFLOW_TRACKING_URI.
        experiment: its name, made where there is none.
        name: of the run; default: the run folder's.
        tags: of the run.
    """

    name, package, extra = "mlflow", "mlflow", "weft[mlflow]"
    can_stop = False

    def __init__(
        self,
        uri: str | None = None,
        experiment: str = "weft",
        name: str | None = None,
        tags: dict[str, str] | None = None,
    ):
        super().__init__()
        uri = uri or os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            fix = 'write uri = "http://host:5000" or "sqlite:///mlflow.db", or set'
            raise ConfigError(
                "train.loggers.uri", uri, "mlflow needs it", f"{fix} MLFLOW_TRACKING_URI"
            )
        if uri.startswith("sqlite:") and importlib.util.find_spec("sqlalchemy") is None:
            problem, fix = "needs the package sqlalchemy", "install it: pip install mlflow"
            raise DataError("train.loggers.uri", uri, problem, fix)
        self._uri, self._experiment, self._name, self._tags = uri, experiment, name, tags

    def open(self, done: int) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = client = MlflowClient(self._uri)
        known = self.run_id()
        if known is not None:
            self._id = client.get_run(known).info.run_id
            client.set_terminated(self._id, "RUNNING")
            return
        found = client.get_experiment_by_name(self._experiment)
        where = found.experiment_id if found else client.create_experiment(self._experiment)
        name = self._name or self.folder.name
        self._id = client.create_run(where, run_name=name, tags=self._tags).info.run_id
        self.keep_run_id(self._id)
        params = [Param(key, str(value)[:500]) for key, value in _flat(self.run.config)]
        for first in range(0, len(params), 100):  # which is as many as it takes at a time
            client.log_batch(self._id, params=params[first : first + 100])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(key, float(value), now, step) for key, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def back_to(self, step: int) -> None:
        """It forgets nothing: steps that are taken again are there twice."""

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def _flat(tables: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


LOGGERS: Mapping[str, type[Logger]] = {
    kind.name: kind for kind in (TensorBoard, Csv, Wandb, Mlflow)
}


def has_tensorboard() -> bool:
    """Whether the package that reads and writes its events is installed."""
    return importlib.util.find_spec("tensorboard") is not None
