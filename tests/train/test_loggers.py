"""Loggers: they get what metrics.jsonl gets, and a tracker that fails costs a run nothing."""

from __future__ import annotations

import csv
import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.train.test_trainer import cut_short, lines, make
from weft.callbacks import Callbacks, Csv, WatchedRun
from weft.core.errors import Refusal
from weft.core.run_config import RunConfig
from weft.launch.local_workers import Pool
from weft.train import build, loggers, trainer
from weft.train.loggers import Logger


class Tracker(Logger):
    """Remembers what it gets; `fails` times it does not answer, and where `gate` is closed it
    waits."""

    name = "tracker"

    def __init__(self, fails: int = 0, gate: threading.Event | None = None):
        super().__init__()
        self.fails, self.gate = fails, gate
        self.got: list[Any] = []

    def open(self, done: int) -> None:
        if self.gate is not None:
            self.gate.wait()
        if self.fails:
            self.fails -= 1
            raise ConnectionError("nobody\nis here")
        self.got.append(("open", done))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.got.append((step, dict(values)))

    def back_to(self, step: int) -> None:
        self.got.append(("back", step))

    def close(self, failed: bool) -> None:
        self.got.append(("failed" if failed else "ended",))


def logged(run: RunConfig, *names: Any) -> RunConfig:
    train = run.train.model_copy(update={"loggers": names})
    return run.model_copy(update={"train": train})


def train_with(tracker: Tracker, run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_callbacks", lambda run: [tracker])
    trainer.train(run, False)


def rows(run: RunConfig) -> list[dict[str, float]]:
    with open(Path(run.output) / "metrics.csv", newline="") as file:
        return [
            {key: float(value) for key, value in row.items() if value}
            for row in csv.DictReader(file)
        ]


# ---- what a tracker gets -------------------------------------------------------------------------


def test_a_tracker_gets_the_lines_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker, run = Tracker(), make(tmp_path, train__eval_every=3)
    train_with(tracker, run, monkeypatch)
    expected = [(line.pop("step"), line) for line in lines(run)]
    assert tracker.got == [("open", 0), *expected, ("ended",)]


def test_a_csv_file_has_a_row_for_each_line_and_goes_on(tmp_path: Path, pool: Pool) -> None:
    whole = logged(make(tmp_path / "whole", "dp2", train__eval_every=2), "csv")
    pool.run(trainer.train, whole, False, world=2)
    assert rows(whole) == lines(whole)
    assert not (Path(whole.output) / "tensorboard").exists()
    halves = logged(cut_short(whole, tmp_path / "halves", "dp2", train__eval_every=2), "csv")
    file = Path(halves.output) / "metrics.csv"
    file.write_text(file.read_text() + "99")  # a crash cut it short
    pool.run(trainer.train, halves, True, world=2)
    assert rows(halves) == lines(halves)
    assert [row["step"] for row in rows(halves)] == [1, 2, 2, 3, 4, 4, 5, 6, 6]


def test_a_rollback_is_passed_on() -> None:
    engine: Any = None
    tracker, run = Tracker(), WatchedRun(engine, say=lambda text: None)
    tracker.run, tracker._done = run, 0
    for step in (1, 2, 3):
        tracker.on_log(run, {"step": step, "loss": 1.0, "tokens_per_expert": {"a": [1]}})
    tracker.on_rollback(run, 1)
    tracker.on_log(run, {"step": 2, "loss": 2.0})
    tracker.on_run_failed(run, ValueError())
    assert tracker.got == [
        ("open", 0),
        (1, {"loss": 1.0}),
        (2, {"loss": 1.0}),
        (3, {"loss": 1.0}),
        ("back", 1),
        (2, {"loss": 2.0}),
        ("failed",),
    ]


def test_a_loop_of_ones_own_logs(tmp_path: Path) -> None:
    class Engine:
        steps_done = 0

    engine: Any = Engine()
    with Callbacks([Csv()], engine, folder=tmp_path) as callbacks:
        for engine.steps_done in (1, 2):
            callbacks.log({"loss": engine.steps_done / 2})
    assert (tmp_path / "metrics.csv").read_text().split() == ["step,loss", "1,0.5", "2,1.0"]
    with pytest.raises(Exception, match="csv writes to it"), Callbacks([Csv()], engine):
        pass


# ---- one that fails ------------------------------------------------------------------------------


def test_what_a_tracker_missed_comes_when_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tracker, run = Tracker(fails=4), make(tmp_path)
    train_with(tracker, run, monkeypatch)
    expected = [(line.pop("step"), line) for line in lines(run)]
    assert tracker.got == [("open", 0), *expected, ("ended",)] and len(expected) == 6
    said = "tracker: ConnectionError: nobody is here; metrics.jsonl has all metrics"
    assert capfd.readouterr().out.count(said) == 1


def test_a_tracker_that_never_answers_does_not_stall_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loggers, "PATIENCE_S", 0.1)
    gate = threading.Event()
    tracker, run = Tracker(gate=gate), make(tmp_path)
    train_with(tracker, run, monkeypatch)
    assert len(lines(run)) == 6 and tracker.got == []
    said = "tracker: does not answer for 0.1 s after the run; metrics.jsonl has all"
    assert capfd.readouterr().out.count(said) == 1
    gate.set()


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "without", "says"),
    [
        ("wandb", "wandb", 'needs the package wandb. Install it: pip install "weft\\[wandb\\]"'),
        ("mlflow", "mlflow", 'the package mlflow. Install it: pip install "weft\\[mlflow\\]"'),
        ("tensorboard", "tensorboard", "needs the package tensorboard"),
        ("wandd", "", "train.loggers = 'wandd': is not a logger. Did you mean \"wandb\""),
        (
            {"name": "csv", "file": "a"},
            "",
            "train.loggers.file = 'a': is not a known argument of csv",
        ),
        ({"project": "a"}, "", "has no name"),
    ],
)
def test_what_cannot_log_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: Any, without: str, says: str
) -> None:
    if without:
        monkeypatch.setitem(sys.modules, without, None)
    with pytest.raises(Refusal, match=says):
        build.build_callbacks(logged(make(tmp_path), entry))


def test_mlflow_needs_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers.importlib.util, "find_spec", {"mlflow": True}.get)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(Refusal, match=r"loggers.uri = None: mlflow needs it. Write uri = "):
        build.build_callbacks(logged(make(tmp_path), "mlflow"))
    table = {"name": "mlflow", "uri": "sqlite:///runs.db"}
    with pytest.raises(Refusal, match=r"needs the package sqlalchemy"):
        build.build_callbacks(logged(make(tmp_path), table))


# ---- the trackers themselves, where they are installed -------------------------------------------


def test_wandb_offline(tmp_path: Path, pool: Pool) -> None:
    pytest.importorskip("wandb")
    table = {"name": "wandb", "project": "tried", "mode": "offline"}
    run = logged(make(tmp_path, "dp2"), table)
    pool.run(trainer.train, run, False, world=2)
    [file] = (Path(run.output) / "wandb").glob("offline-run-*/run-*.wandb")  # rank 0's alone
    kept = file.read_bytes()
    for line in lines(run):  # its values are JSON
        assert json.dumps(line["loss"]).encode() in kept


def test_mlflow_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    table = {"name": "mlflow", "uri": (tmp_path / "tracked").as_uri(), "experiment": "tried"}
    run = logged(make(tmp_path), table)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    trainer.train(run, False)
    client = mlflow.MlflowClient(table["uri"])
    [found] = client.search_runs([client.get_experiment_by_name("tried").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["train.batch"] == "8" and found.data.params["layout.axes"] == "dp1"
    history = client.get_metric_history(found.info.run_id, "loss")
    expected = [(line["step"], line["loss"]) for line in lines(run)]
    assert [(point.step, point.value) for point in history] == expected
