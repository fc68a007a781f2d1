"""Callbacks: when they are called, on which ranks, how they stop a run, and what one that raises
does."""

from __future__ import annotations

import json
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import weft
from tests.run_files import TINY
from tests.train.test_trainer import make, saved
from weft.callbacks import Callback, Callbacks, Csv, EarlyStopping, WatchedRun
from weft.checkpoint import latest_step
from weft.cli.app import app
from weft.core.errors import NO_CODE, ConfigError, WeftError, WorkerDied
from weft.data import collate, stdlib
from weft.launch.local_workers import Pool
from weft.losses import next_token
from weft.models import decoder
from weft.train import build
from weft.train.trainer import train

HERE = "tests.train.test_callbacks"


class Diary:
    """Writes down, rank by rank, what is called."""

    def __init__(self, path: str):
        self.path = path

    def _note(self, run: WatchedRun, what: str, *facts: Any) -> None:
        with open(f"{self.path}-{run.rank}", "a") as file:
            file.write(json.dumps([what, run.step, *facts]) + "\n")

    def on_run_begin(self, run: WatchedRun) -> None:
        assert run.config["train"]["batch"] == 8 and run.steps == 6
        self._note(run, "begin")

    def on_step_end(self, run: WatchedRun, result: weft.StepResult, metrics: Any) -> None:
        self._note(run, "step", float(result.loss), metrics and metrics["loss"])

    def on_validation_end(self, run: WatchedRun, metrics: Any) -> None:
        self._note(run, "validation", metrics["val_loss"])

    def on_checkpoint_saved(self, run: WatchedRun, step: int) -> None:
        self._note(run, "checkpoint", step)

    def on_log(self, run: WatchedRun, line: Any) -> None:
        self._note(run, "log", *("loss" in line, "val_loss" in line))

    def on_run_end(self, run: WatchedRun) -> None:
        self._note(run, "end", run.stop_reason)

    def on_run_failed(self, run: WatchedRun, error: BaseException) -> None:
        self._note(run, "failed", str(error))


class Stops:
    """Asks one rank to stop the run after a step."""

    def __init__(self, step: int, rank: int):
        self.step, self.rank = step, rank

    def on_step_end(self, run: WatchedRun, result: weft.StepResult, metrics: Any) -> None:
        if (run.step, run.rank) == (self.step, self.rank):
            run.stop("it is enough")


class CsvThatStops(Csv):
    """Asks one rank to stop the run, and is of weft's own but for that."""

    def on_step_end(self, run: WatchedRun, result: weft.StepResult, metrics: Any) -> None:
        if run.step == 2 and run.rank == 1:
            run.stop("rows are enough")


class Breaks(Callback):
    """Raises in one method on one rank after a step."""

    def __init__(self, method: str, step: int, rank: int):
        def fails(run: WatchedRun, *arguments: Any) -> None:
            if (run.step, run.rank) == (step, rank):
                raise ValueError("no such\nfriend")

        setattr(self, method, fails)


class Slow:
    """Sleeps on rank 0, in each method once."""

    def __init__(self) -> None:
        self._slept: set[str] = set()

    def _sleep(self, method: str, run: WatchedRun) -> None:
        if run.rank == 0 and method not in self._slept:
            self._slept.add(method)
            time.sleep(5)

    def on_run_begin(self, run: WatchedRun) -> None:
        self._sleep("begin", run)

    def on_checkpoint_saved(self, run: WatchedRun, step: int) -> None:
        self._sleep("checkpoint", run)

    def on_run_end(self, run: WatchedRun) -> None:
        self._sleep("end", run)


class Misspelt:
    def on_step_ends(self, run: WatchedRun, result: weft.StepResult, metrics: Any) -> None: ...


class Silent:
    pass


def diary(path: Path, rank: int) -> list[list[Any]]:
    return [json.loads(line) for line in Path(f"{path}-{rank}").read_text().splitlines()]


def callback(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": f"{HERE}:{name}", **arguments}


def watched(folder: Path, axes: str, *more: Any, **settings: Any) -> Any:
    """A run with a Diary, and further callbacks before it."""
    run = make(folder, axes, **settings)
    tables = (*more, callback("Diary", path=str(folder / "diary")))
    # a run file's text for tables is JSON's only up to their `:`
    train_table = run.train.model_copy(update={"callbacks": tables})
    return run.model_copy(update={"train": train_table})


# ---- when they are called ------------------------------------------------------------------------


@pytest.mark.parametrize("axes", ["dp1", "dp2", "pp2"])
def test_every_rank_calls_them_at_the_same_points(tmp_path: Path, pool: Pool, axes: str) -> None:
    run = watched(tmp_path, axes, train__eval_every=3, train__log_every=2)
    ranks = range(1 if axes == "dp1" else 2)
    pool.run(train, run, False, world=len(ranks))
    lines = [json.loads(t) for t in (Path(run.output) / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    validations = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}
    for rank in ranks:
        called = diary(tmp_path / "diary", rank)
        order = [tuple(entry[:2]) for entry in called if entry[0] != "log"]
        assert order == [
            ("begin", 0),
            ("step", 1),
            ("step", 2),
            ("step", 3),
            ("validation", 3),
            ("checkpoint", 3),
            ("step", 4),
            ("step", 5),
            ("step", 6),
            ("validation", 6),
            ("checkpoint", 6),
            ("end", 6),
        ]
        steps = {entry[1]: entry[2:] for entry in called if entry[0] == "step"}
        assert {step: logged for step, (_, logged) in steps.items() if logged} == losses
        assert all(steps[step][0] == loss for step, loss in losses.items())
        assert {e[1]: e[2] for e in called if e[0] == "validation"} == validations
        logged = [entry[1] for entry in called if entry[0] == "log"]
        assert logged == ([line["step"] for line in lines] if rank == 0 else [])


def test_one_that_is_slow_is_no_hang(tmp_path: Path, pool: Pool) -> None:
    run = watched(tmp_path, "dp2", callback("Slow"), train__hang_s=3)
    pool.run(train, run, False, world=2)
    assert diary(tmp_path / "diary", 1)[-1] == ["end", 6, None]


# ---- stopping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", ["dp1", "dp2"])
def test_one_rank_stops_them_all_after_the_same_step(tmp_path: Path, pool: Pool, axes: str) -> None:
    world = 1 if axes == "dp1" else 2
    run = watched(tmp_path, axes, callback("Stops", step=4, rank=world - 1))
    assert pool.run(train, run, False, world=world) == [False] * world  # it is done
    for rank in range(world):
        assert diary(tmp_path / "diary", rank)[-2:] == [
            ["checkpoint", 4, 4],
            ["end", 4, "it is enough"],
        ]
    assert latest_step(Path(run.output) / "checkpoints") == 4


def test_a_stopped_run_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train(watched(tmp_path, "dp1", callback("Stops", step=2, rank=0)), False) is False
    assert re.search("^stopped +it is enough$", capfd.readouterr().out, re.M)


def test_one_that_derives_from_a_logger_stops_the_run(tmp_path: Path, pool: Pool) -> None:
    run = watched(tmp_path, "dp2", train__loggers=[])
    table = run.train.model_copy(update={"callbacks": (callback("CsvThatStops"),)})
    pool.run(train, run.model_copy(update={"train": table}), False, world=2)
    assert latest_step(Path(run.output) / "checkpoints") == 2


def test_ranks_exchange_nothing_for_weft_s_own_loggers() -> None:
    engine: Any = None
    assert not Callbacks([Csv()], engine)._any
    assert Callbacks([Csv(), CsvThatStops()], engine)._any


@pytest.mark.parametrize(
    ("reason", "said"),
    [("", "a callback stopped it"), (None, "a callback stopped it"), (7, "7")],
)
def test_any_reason_stops_a_run(reason: Any, said: str) -> None:
    engine: Any = None
    callbacks = Callbacks([Stops(step=1, rank=0)], engine)
    callbacks.run.stop(torch.tensor(1.5))
    assert callbacks.ends() and callbacks.run.stop_reason == "tensor(1.5000)"
    callbacks = Callbacks([Stops(step=1, rank=0)], engine)
    callbacks.run.stop(reason)
    assert callbacks.ends() and callbacks.run.stop_reason == said


def test_early_stopping_waits_for_what_is_better(tmp_path: Path) -> None:
    engine: Any = None
    run, stopping = WatchedRun(engine), EarlyStopping(patience=2, min_delta=0.1)
    for value, stopped in ((3.0, False), (2.95, False), (2.0, False), (2.5, False), (1.95, True)):
        stopping.on_validation_end(run, {"val_loss": value})
        assert bool(run.stop_reason) is stopped, value
    assert run.stop_reason == "val_loss was no better than 2 2 times"
    higher = EarlyStopping("val_accuracy", patience=1, mode="max")
    run = WatchedRun(engine)
    for value in (0.1, 0.2, 0.3):
        higher.on_validation_end(run, {"val_accuracy": value})
        assert run.stop_reason is None
    higher.on_validation_end(run, {"val_accuracy": 0.3})
    assert run.stop_reason


EARLY = "weft.callbacks:EarlyStopping"


def test_a_metric_of_no_validation_is_refused(tmp_path: Path) -> None:
    for entry in (EARLY, {"name": EARLY, "metric": "val_accuracy"}):
        run = make(tmp_path)
        table = run.train.model_copy(update={"callbacks": (entry,)})
        run = run.model_copy(update={"train": table})
        with pytest.raises(ConfigError, match="eval_every = 0: EarlyStopping waits for val_"):
            build.build_callbacks(run)
        table = run.train.model_copy(update={"eval_every": 2})
        assert build.build_callbacks(run.model_copy(update={"train": table}))


@pytest.mark.parametrize("metric", ["val_los", "los"])
def test_a_metric_that_never_came_is_named_at_the_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], metric: str
) -> None:
    entries = ({"name": EARLY, "metric": metric}, EARLY)
    train(watched(tmp_path, "dp1", *entries, train__eval_every=3, train__log_every=2), False)
    said = " ".join(capfd.readouterr().out.split())
    assert said.count("EarlyStopping never acted") == 1, said
    hint = f'no metrics had {metric}, so EarlyStopping never acted: did you mean "{metric}s"?'
    assert hint in said, said


# ---- one that raises -----------------------------------------------------------------------------


@pytest.mark.grid(1, ci=1)
@pytest.mark.parametrize(
    ("method", "axes", "step"),
    [
        ("on_step_end", "dp1", 4),
        ("on_step_end", "dp2", 4),
        ("on_validation_end", "dp2", 4),
        ("on_log", "dp2", 4),
    ],
)
def test_a_callback_that_raises_ends_the_run_in_one_line_and_loses_nothing(
    tmp_path: Path, pool: Pool, method: str, axes: str, step: int
) -> None:
    world = 1 if axes == "dp1" else 2
    rank = 0 if method == "on_log" else world - 1
    broken = callback("Breaks", method=method, step=step, rank=rank)
    run = watched(tmp_path, axes, broken, train__eval_every=4, checkpoint__every=0)
    said = (
        f"callback {HERE}:Breaks: {method} failed on rank {rank}, after step {step}:"
        " ValueError: no such friend"
    )
    with pytest.raises((WeftError, WorkerDied)) as caught:
        pool.run(train, run, False, world=world)
    assert str(caught.value).splitlines()[-1] == said
    for each in range(world):
        assert diary(tmp_path / "diary", each)[-1] == ["failed", step, said]

    assert latest_step(Path(run.output) / "checkpoints") == step
    whole = make(tmp_path / "whole", axes, train__eval_every=4, checkpoint__every=2)
    pool.run(train, whole, False, world=world)
    for name, tensor in saved(run, step).items():
        assert torch.equal(tensor, saved(whole, step)[name]), name
    lines = (Path(run.output) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 4]


def test_one_that_raises_at_the_begin_or_the_end(tmp_path: Path) -> None:
    for method, step in (("on_run_begin", 0), ("on_run_end", 6)):
        broken = callback("Breaks", method=method, step=step, rank=0)
        run = watched(tmp_path / method, "dp1", broken)
        with pytest.raises(WeftError, match=f"^callback .*:Breaks: {method} failed on rank 0"):
            train(run, False)
        assert latest_step(Path(run.output) / "checkpoints") == (step or None)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (f"{HERE}:Misspelt", 'has on_step_ends, which nothing calls. Did you mean "on_step_end"?'),
        (f"{HERE}:Silent", "makes Silent, which has no method of a callback"),
        (f"{HERE}:Dairy", 'has no Dairy. Did you mean "Diary"?'),
        (f"{HERE}:Diary", "train.callbacks.path = None: .*Diary needs it"),
        (
            callback("Stops", step=1, rnak=0),
            'rnak = 0: is not a known argument of .*. Did you mean "rank"',
        ),
        ({"step": 1}, "has no name"),
    ],
)
def test_what_is_no_callback_is_refused(tmp_path: Path, entry: Any, says: str) -> None:
    run = make(tmp_path)
    run = run.model_copy(update={"train": run.train.model_copy(update={"callbacks": (entry,)})})
    with pytest.raises(ConfigError, match=says) as caught:
        build.build_callbacks(run)
    assert caught.value.field.startswith("train.callbacks")


@pytest.mark.parametrize("command", ["train", "verify"])
def test_a_run_file_of_others_calls_no_callback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    for name in (NO_CODE, "PYTHONSAFEPATH"):
        monkeypatch.setenv(name, "")  # and is put back
    monkeypatch.chdir(tmp_path)
    (tmp_path / "touched.py").write_text("open('touched', 'w').close()")
    (tmp_path / "run.toml").write_text(TINY)
    given = ["--no-code", "--set", 'train.callbacks=["touched:Watcher"]']
    result = CliRunner().invoke(app, [command, "run.toml", *given])
    said = " ".join(result.output.split())
    assert result.exit_code == 2, said
    assert "train.callbacks = 'touched:Watcher': is code from outside weft" in said
    assert not (tmp_path / "touched").exists()


# ---- in a loop of one's own ----------------------------------------------------------------------


def own_loop(path: str, axes: str) -> list[int]:
    model, data = decoder(dim=16, layers=2, heads=2, seq_len=16), stdlib(seq_len=16)
    sample = collate([data[0], data[1]])
    plan = weft.plan(model, axes, batch=4, loss=next_token, sample=sample)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    engine = weft.Engine(model, plan, optimizer=optimizer, loss=next_token)
    mine = [Stops(step=3, rank=1), Diary(path)]
    config = {"train": {"batch": 8}}
    with Callbacks(mine, engine, steps=6, config=config) as callbacks:
        for step in range(6):
            batch = collate([data[4 * step + i] for i in range(4)])
            result = engine.step(engine.local(batch))
            callbacks.step_end(result, {"loss": float(result.loss)})
            callbacks.log({"loss": float(result.loss)})
            if callbacks.ends():
                break
    engine.close()
    return [engine.steps_done]


def test_callbacks_in_a_loop_of_ones_own(tmp_path: Path, pool: Pool) -> None:
    assert pool.run(own_loop, str(tmp_path / "diary"), "fsdp2", world=2) == [[3], [3]]
    for rank in (0, 1):
        called = diary(tmp_path / "diary", rank)
        assert [entry[:2] for entry in called if entry[0] != "log"] == [
            ["begin", 0],
            ["step", 1],
            ["step", 2],
            ["step", 3],
            ["end", 3],
        ]
        logged = [entry[1] for entry in called if entry[0] == "log"]
        assert logged == ([1, 2, 3] if rank == 0 else [])
