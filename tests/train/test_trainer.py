"""The training loop: what it leaves in the run folder, that it goes on where it stopped, and when
it stops."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

import weft
from weft import checkpoint
from weft.checkpoint.index import index_text
from weft.core import run_config, short_number
from weft.core.action_costs import ActionCosts
from weft.core.errors import CheckpointError, ConfigError, DataError, WeftError, WorkerDied
from weft.core.run_config import RunConfig
from weft.core.shards import whole_shard
from weft.engine import Engine
from weft.launch.local_workers import Pool
from weft.nn.losses import next_token
from weft.pipeline import schedules
from weft.train import build, build_data, run_checks
from weft.train.data import Loader
from weft.train.generate import generate
from weft.train.metrics import Metrics, StepTimer, keep_until
from weft.train.progress import Progress
from weft.train.run_folder import check_output
from weft.train.trainer import train

RUN = """
[model]
build = "weft.models:decoder"
vocab = 32
dim = 16
layers = 2
heads = 4
kv_heads = 2
hidden = 32
seq_len = 8
dropout = 0.1
[data]
build = "tests.train.test_trainer:Ramps"
[train]
batch = 8
steps = 6
accumulate = 2
clip = 0.5
warmup = 2
decay = "cosine"
log_every = 1
[optimizer]
lr = 1e-2
[checkpoint]
every = 3
"""


class Ramps:
    """Sequences that count up from a number of their own: "abcdefgh". A part of the labels does not
    count.

    `interrupt`: at that read of a sample, rank `rank` gets SIGTERM.
    """

    vocab = 32

    def __init__(self, split: str = "train", size: int = 64, interrupt: int = 0, rank: int = 0):
        self.shift, self.size = (7 if split == "val" else 0), size
        self.reads, self.interrupt, self.rank = 0, interrupt, rank

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.reads += 1
        if self.reads == self.interrupt and int(os.environ.get("RANK", 0)) == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)
        ids = (torch.arange(9) + index * 5 + self.shift) % self.vocab
        labels = ids[1:].clone()
        labels[: index % 5] = -100
        return {"input_ids": ids[:-1], "labels": labels}

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % self.vocab for letter in text]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(chr(96 + i) for i in ids)


class Blobs:
    """Samples that are no text."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((4,), index / 16), "label": torch.tensor(index % 2)}


def classifier() -> nn.Module:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    return Classifier()


class Successor(nn.Module):
    """Is sure that after token i comes i + 1; the last of 8 tokens that it is not to be asked about
    is 9."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(100.0))

    def forward(self, input_ids: Tensor) -> Tensor:
        assert input_ids.shape[1] <= 4
        return self.scale * F.one_hot((input_ids + 1) % 8, 10)


def make(folder: Path, axes: str = "dp1", **settings: Any) -> RunConfig:
    """The run of RUN with its folder below `folder`; `train__steps=9` sets train.steps."""
    path = folder / "run.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(RUN)
    overrides = {key.replace("__", "."): json.dumps(value) for key, value in settings.items()}
    overrides.setdefault("output", json.dumps(str(folder / "out")))
    return run_config.load_run(path, {**overrides, "layout.axes": json.dumps(axes)})


def lines(run: RunConfig) -> list[dict[str, float]]:
    return [
        json.loads(text) for text in (Path(run.output) / "metrics.jsonl").read_text().splitlines()
    ]


def curve(run: RunConfig, key: str = "loss") -> list[tuple[float, float]]:
    return [(line["step"], line[key]) for line in lines(run) if key in line]


def saved(run: RunConfig, step: int) -> dict[str, Tensor]:
    """Every tensor of a checkpoint: weights and optimizer state."""
    folder = Path(run.output) / "checkpoints"
    contents = checkpoint.read_index(folder, step)
    tensors = {
        name: torch.empty(stored.shape, dtype=stored.dtype)
        for name, stored in contents.tensors.items()
    }
    checkpoint.load_checkpoint(
        folder, step, [whole_shard(name, tensor) for name, tensor in tensors.items()]
    )
    return tensors


def cut_short(run: RunConfig, folder: Path, axes: str, **settings: Any) -> RunConfig:
    """A copy of a run of 6 steps as if it had died in the middle of step 6's line, its last
    checkpoint of step 3."""
    other = make(folder, axes, **settings)
    shutil.copytree(run.output, other.output)
    shutil.rmtree(Path(other.output) / "checkpoints" / "step-000006")
    kept = [
        line | {"loss": 0.0} if line["step"] > 3 else line
        for line in lines(run)
        if line["step"] < 6
    ]
    text = "".join(json.dumps(line) + "\n" for line in kept) + '{"step": 6, "lo'
    (Path(other.output) / "metrics.jsonl").write_text(text)
    return other


# ---- what a run leaves ---------------------------------------------------------------------------


def test_a_run_learns_and_leaves_its_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make(
        tmp_path, train__steps=40, train__log_every=10, train__eval_every=20, train__sample_tokens=5
    )
    train(run, False)
    folder = Path(run.output)

    losses = dict(curve(run))
    assert list(losses) == [1, 10, 20, 30, 40]
    assert losses[40] < 0.5 * losses[1]
    assert [step for step, _ in curve(run, "val_loss")] == [20, 40]
    for line in lines(run):
        if "loss" in line:
            assert line["tokens_per_s"] * line["step_s"] == pytest.approx(8 * 8)
            assert line["memory_bytes"] > 10e6
            assert line["epoch"] == line["step"] / 8
            assert 0 < line["grad_norm"] < 100

    assert run_config.load_run(folder / "run.toml") == run
    sample = build_data.sample_batch(run, build_data.build_dataset(run))
    plan = build.build_plan(run, build.build_skeleton(run), sample)
    assert (folder / "plan.txt").read_text() == f"{plan}\n"
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    for key in ("loss", "val_loss", "lr", "tokens_per_s"):
        seen = [(event.step, event.value) for event in events.Scalars(key)]
        assert seen == [(step, pytest.approx(value)) for step, value in curve(run, key)]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-000036",
        "step-000039",
        "step-000040",
    ]
    assert checkpoint.read_index(folder / "checkpoints").meta["layout"] == "dp1"

    sample = (folder / "sample.txt").read_text()
    assert len(sample) == 5
    printed = capfd.readouterr().out
    assert printed.endswith(sample + "\n")
    assert f"loss        {losses[40]:.4f}" in printed
    assert f"step 10/40  loss {losses[10]:.4f}" in printed


def test_learning_rates(tmp_path: Path) -> None:
    settings = {"train__decay": "linear", "train__min_lr_ratio": 0.5, "checkpoint__every": 0}
    run = make(tmp_path, **settings)
    train(run, False)
    rates = [rate for _, rate in curve(run, "lr")]
    assert rates == pytest.approx([0.005, 0.01, 0.01, 0.00875, 0.0075, 0.00625])
    assert not (Path(run.output) / "checkpoints").exists()


def test_rates_are_over_the_steps_since_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lap(clock: StepTimer) -> float:
        clock.total_s += 6
        return 6

    monkeypatch.setattr(StepTimer, "lap", lap)
    run = make(tmp_path, train__log_every=2)
    train(run, False)
    assert curve(run, "step_s") == [(1, 6), (2, 6), (4, 3), (6, 3)]


def test_the_speed_is_without_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    laps = iter((1000.0, 2.0, 2.0, 2.0, 500.0, 2.0, 1000.0))  # first what compiles
    monkeypatch.setattr(StepTimer, "lap", lambda clock: next(laps))
    train(make(tmp_path), False)
    out = capfd.readouterr().out
    assert re.search(r"speed +32 tokens/s \(median without the first step\)", out)
    train(make(tmp_path / "one", train__steps=1, train__warmup=0), False)
    assert re.search(r"speed .* tokens/s \(of the first step\)", capfd.readouterr().out)


def test_time_to_save_is_no_time_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, clock, save = [0.0], time.perf_counter, checkpoint.AsyncCheckpointer.save

    def slow(*args: Any) -> None:
        now[0] += 1000
        save(*args)

    monkeypatch.setattr("weft.train.metrics.time.perf_counter", lambda: clock() + now[0])
    monkeypatch.setattr(checkpoint.AsyncCheckpointer, "save", slow)
    run = make(tmp_path, checkpoint__every=1)
    train(run, False)
    assert now[0] == 6000
    assert all(step_s < 500 for _, step_s in curve(run, "step_s"))


def test_samples_that_are_no_text(tmp_path: Path) -> None:
    run = make(tmp_path / "a", train__sample_tokens=5)
    tables = run.model_dump(exclude_none=True)
    tables["model"] = {"build": "tests.train.test_trainer:classifier"}
    tables["data"] = {"build": "tests.train.test_trainer:Blobs"}
    tables["train"] |= {"loss": "weft.losses:classification"}
    run = RunConfig.model_validate(tables)
    with pytest.raises(
        ConfigError, match=r"train.sample_tokens = 5: Blobs lacks vocab, encode and decode"
    ):
        train(run, False)
    tables["train"] |= {"sample_tokens": 0}
    tables["precision"] = {"compute": "fp64"}  # also of what the dataset gives in float32
    train(RunConfig.model_validate(tables), False)
    assert lines(run)[-1]["samples_per_s"] > 0
    assert saved(run, 6)["linear.weight"].dtype == torch.float64


def test_validation_is_the_mean_over_what_counts(tmp_path: Path, pool: Pool) -> None:
    settings = {
        "train__eval_every": 4,
        "train__eval_batches": 3,
        "precision__compute": "fp64",
        "model__dropout": 0.0,
    }
    one, two = make(tmp_path / "one", "dp1", **settings), make(tmp_path / "two", "dp2", **settings)
    train(one, False)
    pool.run(train, two, False, world=2)
    assert [step for step, _ in curve(one, "val_loss")] == [4, 6]
    for (_, a), (_, b) in zip(curve(one, "val_loss"), curve(two, "val_loss"), strict=True):
        assert a == pytest.approx(b, rel=1e-12)

    model = build.build_model(one, dtype=torch.float64)
    model.load_state_dict({name: saved(one, 6)[name] for name in model.state_dict()})
    dataset, total, weight = Ramps("val"), 0.0, 0.0
    order = Loader(
        dataset, 8, one.train.seed
    )  # the same batches each time, drawn from all that is held out
    for index in [i for step in range(3) for i in order.indices(step)]:
        batch = {key: value[None] for key, value in dataset[index].items()}
        loss_sum, count = next_token(model(batch["input_ids"]), batch)
        total, weight = total + loss_sum.item(), weight + count.item()
    assert curve(one, "val_loss")[-1][1] == pytest.approx(total / weight, rel=1e-12)


def test_validation_takes_no_part_in_training(tmp_path: Path, pool: Pool) -> None:
    bare, watched = (
        make(tmp_path / "bare", "fsdp2"),
        make(tmp_path / "watched", "fsdp2", train__eval_every=1),
    )
    pool.run(train, bare, False, world=2)
    pool.run(train, watched, False, world=2)
    assert curve(bare) == curve(watched)


def test_a_pipeline_is_drawn_as_it_ran_and_as_predicted(tmp_path: Path, pool: Pool) -> None:
    run = make(tmp_path, "pp2+zb-h1", train__accumulate=4)
    pool.run(train, run, False, True, world=2)
    folder = Path(run.output)
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    for name in ("predicted", "measured"):
        (process,) = [
            e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == name
        ]
        ran = [
            e["name"]
            for e in events
            if e["pid"] == process and e["ph"] == "X" and e["name"] != "recv-wait"
        ]
        wanted = [
            str(action)
            for actions in schedules.make_schedule("zb-h1", 2, 4).order
            for action in actions
        ]
        assert sorted(ran) == sorted(wanted), name
    assert "measured" in (folder / "trace.svg").read_text()
    costs = ActionCosts.from_json((folder / "costs.json").read_text())
    assert all(
        seconds > 0
        for field in (costs.forward_s, costs.backward_s, costs.weight_s)
        for seconds in field
    )

    solved = make(
        tmp_path / "next",
        "pp2+solved",
        train__accumulate=4,
        pipeline__costs=str(folder / "costs.json"),
    )
    assert run_checks.check_run(solved)[0].schedule.name == "solved"
    missing = make(tmp_path / "none", "pp2+solved", pipeline__costs="costs.json")
    with pytest.raises(ConfigError, match="weft train --trace wrote"):
        run_checks.check_run(missing)


def test_a_trace_shows_sums_of_gradients_beside_the_backward(tmp_path: Path, pool: Pool) -> None:
    run = make(tmp_path, "dp2")
    pool.run(train, run, False, True, world=2)
    events = json.loads((Path(run.output) / "trace.json").read_text())["traceEvents"]
    [measured] = [
        e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == "measured"
    ]
    ran = [e for e in events if e["pid"] == measured and e["ph"] == "X"]
    assert sorted(e["name"] for e in ran) == ["0B0", "0B1", "0F0", "0F1", "reduce"]
    [last, reduced] = [next(e for e in ran if e["name"] == name) for name in ("0B1", "reduce")]
    assert last["ts"] < reduced["ts"] < last["ts"] + last["dur"] and reduced["dur"] > 0


# ---- going on ------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", ["dp2", "fsdp2", "tp2", "pp2+zb-v"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, pool: Pool, axes: str
) -> None:
    whole_run = make(tmp_path / "whole", axes)
    pool.run(train, whole_run, False, world=2)
    halves = cut_short(whole_run, tmp_path / "halves", axes)
    time.sleep(
        1 - time.time() % 1
    )  # TensorBoard reads its files in the order of the seconds in which they began
    pool.run(train, halves, True, world=2)

    assert [step for step, _ in curve(halves)] == [1, 2, 3, 4, 5, 6]
    for key in ("loss", "lr", "grad_norm"):
        assert curve(halves, key) == curve(whole_run, key)
    once, twice = saved(whole_run, 6), saved(halves, 6)
    assert once.keys() == twice.keys()
    assert any(name.startswith("optimizer/") for name in once)
    for name, tensor in once.items():
        assert torch.equal(tensor, twice[name]), name
    events = EventAccumulator(str(Path(halves.output) / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.grid(2, ci=2)
@pytest.mark.parametrize(
    ("before", "after", "tied"),
    [
        ("fsdp2", "tp2", False),
        ("pp2", "fsdp2", True),
        ("tp2", "pp2+zb-v", True),
        ("pp2.dp2", "pp4", True),
    ],
)
def test_a_run_is_resumed_under_another_layout(
    tmp_path: Path, pool: Pool, before: str, after: str, tied: bool
) -> None:
    """Weights tied over stages too: `layers` leaves two stages on each of two ranks their part."""
    settings = {"precision__compute": "fp64", "model__tied": tied, "model__layers": 4}
    first = make(tmp_path / "first", before, **settings)
    pool.run(train, first, False, world=weft.Layout.parse(before).world)
    other = cut_short(first, tmp_path / "other", after, **settings)
    pool.run(train, other, True, world=weft.Layout.parse(after).world)
    assert [step for step, _ in curve(other)] == [1, 2, 3, 4, 5, 6]
    for (_, a), (_, b) in zip(curve(first), curve(other), strict=True):
        assert a == pytest.approx(b, rel=1e-9)
    once, twice = saved(first, 6), saved(other, 6)
    for name, tensor in once.items():
        assert (tensor - twice[name]).norm() <= 1e-9 * tensor.norm(), name


def test_sigterm_at_one_rank_saves_and_stops_all(tmp_path: Path, pool: Pool) -> None:
    whole_run = make(tmp_path / "whole", "dp2", train__steps=9)
    pool.run(train, whole_run, False, world=2)
    # rank 1 reads four samples before the first step, then takes 4 samples a step: the signal
    # comes in step 3
    settings = {"train__steps": 9, "checkpoint__every": 0}
    run = make(tmp_path / "stopped", "dp2", data__interrupt=13, data__rank=1, **settings)
    assert pool.run(train, run, False, world=2) == [True, True]
    stopped = checkpoint.latest_step(Path(run.output) / "checkpoints")
    assert stopped == 4  # the ranks hear of it while the next step runs
    assert curve(run) == curve(whole_run)[:stopped]

    pool.run(train, make(tmp_path / "stopped", "dp2", **settings), True, world=2)
    assert curve(run) == curve(whole_run)
    assert (
        pool.run(signal.getsignal, signal.SIGTERM, world=2) == [signal.SIG_DFL] * 2
    )  # as before the run


def test_sigterm_without_a_process_group(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run = make(tmp_path, data__interrupt=14, train__sample_tokens=5)
    train(run, False)
    assert checkpoint.latest_step(Path(run.output) / "checkpoints") == 2  # 8 samples a step
    assert not (Path(run.output) / "sample.txt").exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_finished_run_has_nothing_left_to_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path, train__eval_every=3)
    train(run, False)
    before = lines(run)
    train(run, True)
    assert lines(run) == before
    assert "steps       6/6" in capfd.readouterr().out


def test_lines_past_a_step_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "loss": 2}\n{"step": 2, "loss": 3}\n{"step": 2, "val_loss": 3}\n{"step":'
        ' 3}\n{"st'
    )
    keep_until(path, 2)
    assert (
        path.read_text()
        == '{"step": 1, "loss": 2}\n{"step": 2, "loss": 3}\n{"step": 2, "val_loss": 3}\n'
    )
    metrics = Metrics(tmp_path, 1)
    assert path.read_text() == '{"step": 1, "loss": 2}\n'
    metrics.write({"step": 2, "loss": 1})
    assert path.read_text() == '{"step": 1, "loss": 2}\n{"step": 2, "loss": 1}\n'


def test_who_leads_next_adds_what_the_one_before_has_not_written(tmp_path: Path) -> None:
    first, other = Metrics(tmp_path, 0), Metrics(tmp_path, 0, writes=False)
    steps = [{"step": step, "loss": float(step)} for step in range(7)]
    for step in (1, 2, 3):
        first.write(steps[step])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # it died
    for step in (2, 3, 4, 5):
        other.write(steps[step], leads=False)
    other.write({"step": 4, "val_loss": 3.0}, leads=False)
    other.write(steps[6])
    texts = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(text) for text in texts]
    assert [line["step"] for line in found if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in found if "val_loss" in line] == [4]


def test_metrics_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    said = r"^\S+: metrics cannot be written \(.*\); --resume goes on$"
    metrics = Metrics(tmp_path, 0)
    metrics.write({"step": 1, "loss": 1.0})
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(WeftError, match=said):
        metrics.write({"step": 2, "loss": 1.0})


# ---- stopping ------------------------------------------------------------------------------------


def test_a_fresh_run_does_not_write_over_an_old_one(tmp_path: Path) -> None:
    run = make(tmp_path)
    train(run, False)
    before = lines(run)
    for refuse in (check_output, train):
        with pytest.raises(
            ConfigError, match=r"holds the checkpoints of a run. Go on from step 6 with --resume"
        ):
            refuse(run, False)
    assert lines(run) == before
    shutil.rmtree(Path(run.output) / "checkpoints")
    with pytest.raises(
        ConfigError, match=r"holds the metrics of a run. Name another folder with --output"
    ) as caught:
        check_output(run, False)
    assert (caught.value.field, caught.value.value) == ("output", run.output)
    with pytest.raises(CheckpointError, match="no complete checkpoint is here"):
        check_output(run, True)
    check_output(make(tmp_path, output=str(tmp_path / "other")), False)


def test_a_run_is_not_resumed_in_another_order_of_samples(tmp_path: Path) -> None:
    train(make(tmp_path), False)
    check_output(make(tmp_path, train__steps=9), True)
    for key, value, was in (("batch", 16, 8), ("seed", 1, 0)):
        with pytest.raises(
            ConfigError, match=rf"train.{key} = {value}: .* Resume with {key} {was}"
        ):
            check_output(make(tmp_path, **{f"train__{key}": value}), True)


def test_a_run_is_not_resumed_with_another_optimizer(tmp_path: Path) -> None:
    """AdamW's first moments are not Lion's. A checkpoint that does not say whose state it holds is
    told by what it holds."""
    train(make(tmp_path), False)
    check_output(make(tmp_path, optimizer__lr=1e-4), True)
    for name in ("lion", "adam", "sgd"):
        other = make(tmp_path, optimizer__name=name, train__steps=9)
        said = rf"optimizer.name = '{name}': .* holds the state of adamw. Resume with \"adamw\""
        with pytest.raises(ConfigError, match=said):
            check_output(other, True)
    folder = tmp_path / "out" / "checkpoints"
    contents = checkpoint.read_index(folder)
    assert contents.scalars.pop("optimizer") == "adamw"
    (folder / "step-000006" / "index.json").write_text(index_text(contents))
    for name, kept in (("lion", "exp_avg_sq"), ("sgd", "exp_avg")):
        other = make(tmp_path, optimizer__name=name, train__steps=9)
        check_output(other, True)
        with pytest.raises(CheckpointError, match=rf"has {kept} of .*, which \w+ does not keep"):
            train(other, True)


def test_a_checkpoint_of_a_larger_model_is_not_resumed(tmp_path: Path) -> None:
    run = make(tmp_path, model__layers=3)
    train(run, False)
    smaller = make(tmp_path, model__layers=2, train__steps=run.train.steps + 1)
    with pytest.raises(CheckpointError, match=r"blocks\.2\..* and the model does not"):
        train(smaller, True)


def test_an_unwritable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written to"):
        check_output(make(tmp_path, output=str(tmp_path / "file" / "out")), False)


def test_a_split_smaller_than_a_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"has 7 samples, fewer than one batch. Use a batch of at most 7, or more data",
    ):
        train(make(tmp_path, data__size=7), False)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    # of AdamW's first step, weights of about 1e20; nothing is to be logged or saved before step 4
    settings = {
        "optimizer__lr": 1e20,
        "train__log_every": 100,
        "checkpoint__every": 4,
        "train__warmup": 0,
    }
    run = make(tmp_path, **settings)
    with pytest.raises(
        WeftError, match=r"step 2('s gradient)? is (nan|inf). No checkpoint was written"
    ):
        train(run, False)
    assert [line["step"] for line in lines(run)] == [1]


def weighed(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """`next_token`; of a batch with a certain sequence in it, not finite."""
    loss, weight = next_token(output, batch)
    return loss * (torch.nan if bool((batch["input_ids"][:, 0] < 4).any()) else 1.0), weight


def test_steps_that_are_left_out_are_counted_and_said(
    tmp_path: Path, pool: Pool, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "train__loss": "tests.train.test_trainer:weighed",
        "train__skip": 10.0,
        "train__steps": 16,
        "train__batch": 2,
    }
    settings |= {"train__accumulate": 1}
    run = make(tmp_path, "dp2", **settings)
    pool.run(train, run, False, world=2)
    left_out = sum(line.get("skipped", 0) for line in lines(run))
    assert 0 < left_out < 10 and all(
        math.isfinite(line["loss"]) for line in lines(run) if "loss" in line
    )
    rest = make(tmp_path / "all", "dp1", **settings, data__build="tests.train.test_trainer:Bad")
    with pytest.raises(
        WeftError, match=r"10 steps in a row, the last one 10, .*\(train.skip = 10\)"
    ):
        train(rest, False)
    assert capfd.readouterr().out.count("left out: a gradient of norm nan") == 10


def steep(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """`next_token`, with gradients that are too large for the first scale in fp16."""
    loss, weight = next_token(output, batch)
    return loss * 1e5, weight


def test_the_summary_counts_skipped_steps_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"train__loss": "tests.train.test_trainer:weighed", "train__skip": 10.0}
    settings |= {"train__steps": 16, "train__batch": 2, "train__accumulate": 1}
    # each step is saved, and every eighth logged
    run = make(tmp_path, **settings, checkpoint__every=1, train__log_every=8)
    train(run, False)
    left_out, out = int(sum(line.get("skipped", 0) for line in lines(run))), capfd.readouterr().out
    assert left_out and out.count("left out: a gradient of norm nan") == left_out
    assert re.search(rf"skipped +{left_out} steps?, left out by train.skip", out)
    steep = {"precision__compute": "fp16", "train__loss": "tests.train.test_trainer:steep"}
    train(make(tmp_path / "low", **steep, train__steps=3), False)
    skipped = re.search(
        r"skipped +(\d) steps?, whose gradients overflowed in fp16", capfd.readouterr().out
    )
    assert skipped is not None and int(skipped[1]) >= 1
    train(make(tmp_path / "plain"), False)
    assert "skipped" not in capfd.readouterr().out


class Bad(Ramps):
    """All of its sequences are that one."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: torch.full_like(value, 3) for key, value in super().__getitem__(index).items()}


def test_a_checkpoint_of_useless_weights_is_not_written(tmp_path: Path, pool: Pool) -> None:
    # the first step of RMSprop is 10 times its learning rate: too much for float32
    settings = {
        "optimizer__name": "rmsprop",
        "optimizer__lr": 1e38,
        "train__warmup": 0,
        "checkpoint__every": 1,
    }
    run = make(tmp_path, "dp2", **settings)
    with pytest.raises(
        WorkerDied,
        match=(
            r"(weight after step 1 is not finite|loss of step 2 is nan)\. No checkpoint was written"
        ),
    ):
        pool.run(train, run, False, world=2)
    assert checkpoint.latest_step(Path(run.output) / "checkpoints") is None
    assert math.isfinite(lines(run)[0]["loss"])


# ---- text and pictures ---------------------------------------------------------------------------


def test_generation_follows_the_model() -> None:
    model = Successor()
    plan = weft.plan(model, "dp1", batch=1)
    engine = Engine(
        model, plan, optimizer=lambda named: torch.optim.SGD(named, lr=0.1), loss=next_token
    )
    assert generate(engine, [3], 10, context=4, vocab=10, seed=0) == [4, 5, 6, 7, 0, 1, 2, 3, 4, 5]
    with torch.no_grad():
        # all alike: what is drawn depends on the seed and stays below the vocabulary
        model.scale.zero_()
    drawn = generate(engine, [3], 50, context=4, vocab=3, seed=0)
    assert set(drawn) == {0, 1, 2}
    assert drawn == generate(engine, [3], 50, context=4, vocab=3, seed=0)
    assert drawn != generate(engine, [3], 50, context=4, vocab=3, seed=1)


@pytest.mark.slow(ci=False)
def test_the_sample_does_not_depend_on_the_layout(tmp_path: Path, pool: Pool) -> None:
    # trained well enough that what is drawn depends on where in the sequence it is asked for
    settings = {
        "train__steps": 25,
        "train__log_every": 25,
        "optimizer__lr": 0.03,
        "precision__compute": "fp64",
    }
    settings |= {"train__sample_tokens": 12, "train__prompt": "abc"}
    one = make(tmp_path / "one", "dp1", **settings)
    train(one, False)
    sample = (Path(one.output) / "sample.txt").read_text()
    assert len(sample) == 15 and sample.startswith("abc")
    for axes in ("tp2+sequence", "dp2.fsdp2", "pp2.tp2"):
        run = make(tmp_path / axes, axes, **settings)
        pool.run(train, run, False, world=weft.Layout.parse(axes).world)
        assert (Path(run.output) / "sample.txt").read_text() == sample


LINE = {
    "step": 5,
    "loss": 2.5,
    "lr": 0.1,
    "tokens_per_s": 12345.6,
    "step_s": 2.0,
    "memory_bytes": 250_000_000,
}


def test_progress_without_a_terminal() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, width=30), 65, 0) as progress:
        progress.step(5)
        progress.log(LINE)
        progress.say("[1] said")
    assert (
        out.getvalue()
        == "step 5/65  loss 2.5000  12.3k tokens/s  250.0 MB  left 0:02:00\n[1] said\n"
    )


def test_progress_on_a_terminal() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, width=120, force_terminal=True), 65, 0) as progress:
        progress.log(LINE)
        progress.step(7)
        progress.say("said")
    assert "step 7/65" in out.getvalue()
    assert "loss 2.5000  12.3k tokens/s  250.0 MB" in out.getvalue()
    assert "said\n" in out.getvalue()
    assert "left 0:02:00" not in out.getvalue()


def test_a_quiet_progress_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress(Console(quiet=True), 65, 0) as progress:
        progress.log(LINE)
        progress.table({"a": "b"})
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.5, "0.5"), (999, "999"), (999.9, "1k"), (1234, "1.23k"), (45.6e6, "45.6M"), (7e9, "7G")],
)
def test_short_numbers(number: float, text: str) -> None:
    assert short_number(number) == text


def test_a_clock_leaves_out_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("weft.train.metrics.time.perf_counter", lambda: now[0])
    clock = StepTimer()
    now[0] += 2
    with clock.pause():
        now[0] += 10
    now[0] += 1
    assert clock.lap() == 3
    now[0] += 4
    assert (clock.lap(), clock.total_s) == (4, 7)


def test_the_schedule_scales_the_rate_of_each_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = {"embedding.*": {"lr": 1e-3}, "*.wq.*": {"lr": 0.1}}
    run = make(tmp_path, optimizer__decay_min_dims=2)
    grouped = run.optimizer.model_copy(update={"groups": groups})
    run = run.model_copy(update={"optimizer": grouped})
    seen: list[dict[str, tuple[float, float]]] = []

    def step(self: Engine, batch: Any) -> Any:
        held = self.optimizer.param_groups
        seen.append({n: (g["lr"], g["weight_decay"]) for g in held for n in g["param_names"]})
        return original(self, batch)

    original = Engine.step
    monkeypatch.setattr(Engine, "step", step)
    train(run, False)
    factor = build.build_lr_factor(run)
    for number, rates in enumerate(seen):
        assert rates["embedding.weight"] == pytest.approx((1e-3 * factor(number), 0.01))
        assert rates["blocks.0.attention.wq.weight"][0] == pytest.approx(0.1 * factor(number))
        assert rates["norm.weight"] == pytest.approx((1e-2 * factor(number), 0.0))
    assert curve(run, "lr") == [
        (number + 1, pytest.approx(1e-2 * factor(number))) for number in range(6)
    ]
