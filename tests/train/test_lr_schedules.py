"""Learning rates: of [train], and of a function of the user's own."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.mutants import Mutant, mutated
from weft.core import ConfigError, load_run
from weft.core.run_config import RunConfig
from weft.train import build, run_checks
from weft.train.trainer import train
from weft.verification.training_check import rate_faults, rate_text
from weft.verification.training_definition import short_run

RUN = """
[model]
build = "weft.models:decoder"
dim = 16
[data]
build = "weft.data:stdlib"
seq_len = 16
[train]
batch = 8
steps = 200
"""
WSD = {"warmup": 20, "decay": '"sqrt"', "decay_share": 0.2}
ONE_CYCLE = {
    "warmup": 60,
    "warmup_shape": '"cosine"',
    "start_lr_ratio": 0.04,
    "decay": '"cosine"',
    "min_lr_ratio": 4e-6,
}
OWN = """
import math
def halves(every, steps=0):
    return lambda step: 0.5 ** (step // every) if step < steps else 0.0
def counts():
    calls = []
    return lambda step: calls.append(step) or float(len(calls))
def negative():
    return lambda step: 1.0 - step
def nothing():
    return None
def text():
    return lambda step: "fast"
def divides(by, steps):
    return lambda step: steps / (by - step) if step == by else 1.0
def falls(to, steps):
    return lambda step: to if step == steps - 1 else 1.0
"""


def load(tmp_path: Path, text: str = RUN, **train: object) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(text)
    (tmp_path / "own_schedules.py").write_text(OWN)
    return load_run(path, {f"train.{key}": str(value) for key, value in train.items()})


def factors(run: RunConfig) -> list[float]:
    factor = build.build_lr_factor(run)
    return [factor(step) for step in range(run.train.steps + 1)]


def test_wsd_rises_stays_and_falls_in_its_share(tmp_path: Path) -> None:
    found = factors(load(tmp_path, **WSD))
    assert found[:20] == [(step + 1) / 20 for step in range(20)]
    assert found[20:161] == [1.0] * 141
    assert found[170] == pytest.approx(1 - math.sqrt(10 / 40))
    assert found[200] == 0.0


def test_one_cycle_is_that_of_torch(tmp_path: Path) -> None:
    """Half a wave up, half a wave down. torch counts the first step as part of neither."""
    found = factors(load(tmp_path, **ONE_CYCLE))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1.0, total_steps=201, pct_start=61 / 201, cycle_momentum=False
    )
    wanted = []
    for _ in range(201):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step() if len(wanted) < 201 else None
    assert found[:60] == pytest.approx(wanted[1:61])
    assert found[60:] == pytest.approx(wanted[60:])


@pytest.mark.parametrize("rules", [WSD, ONE_CYCLE, {"decay": '"linear"', "decay_share": 0.001}])
def test_rates_are_those_of_their_definition(tmp_path: Path, rules: dict[str, object]) -> None:
    run = load(tmp_path, **rules)
    assert rate_faults(run) == rate_faults(short_run(run)) == []


@pytest.mark.parametrize(
    ("rules", "old", "new"),
    [
        (WSD, "if decay_share is not None:", "if False:"),
        (WSD, "1 - math.sqrt(progress)", "1 - progress"),
        (WSD, "steps - max(1, round(decay_share * steps))", "steps - int(decay_share * 99)"),
        (ONE_CYCLE, 'warmup_shape == "cosine"', "False"),
        (ONE_CYCLE, "start_ratio + (1 - start_ratio) * risen", "risen"),
    ],
)
def test_a_fault_of_a_schedule_is_seen(
    tmp_path: Path, rules: dict[str, object], old: str, new: str
) -> None:
    with mutated(Mutant("weft.train.lr_schedule", "lr_factor", old, new)):
        assert rate_faults(load(tmp_path, **rules))


def test_a_fault_of_the_last_step_is_seen(tmp_path: Path) -> None:
    run = load(tmp_path, steps=25_000)
    assert not rate_faults(run)
    last = "return 1.0 if step < steps - 1 else 0.5"
    with mutated(Mutant("weft.train.lr_schedule", "lr_factor", "return 1.0", last)):
        assert "step 24999: factor 0.5, not 1" in str(rate_faults(run))


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ({"decay_share": 0.5}, "train.decay_share = 0.5: has no effect with decay = 'constant'"),
        ({"warmup_shape": '"cosine"'}, "'cosine': has no effect without warmup"),
        ({"start_lr_ratio": 0.5}, "train.start_lr_ratio = 0.5: has no effect without warmup"),
        ({**WSD, "decay_share": 0.95}, "is 190 of 200 steps, and warmup has 20"),
        ({"decay": '"wsd"'}, "train.decay = 'wsd': is not known. Write one of .*sqrt.*WSD"),
    ],
)
def test_schedules_that_do_not_fit(tmp_path: Path, rules: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(tmp_path, **rules)


def own(tmp_path: Path, name: str, arguments: str = "") -> RunConfig:
    table = f'[lr_schedule]\nbuild = "own_schedules:{name}"\n{arguments}'
    return load(tmp_path, RUN + table)


def test_a_schedule_of_the_users_own(tmp_path: Path) -> None:
    run = own(tmp_path, "halves", "every = 50")
    run_checks.check_lr_schedule(run)
    found = factors(run)
    assert found[::50] == [1.0, 0.5, 0.25, 0.125, 0.0]
    assert rate_text(run) == "own_schedules:halves, which one device calls too"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "counts",
            "returns 200 for step 199, and 1 when it is called for the steps in another order",
        ),
        ("negative", "its function returns -1.0 for step 2"),
        ("nothing", "returns NoneType, which cannot be called"),
        ("text", "its function fails at step 0: ValueError"),
        ("halves", "lr_schedule.every = None: own_schedules:halves needs it"),
        ("double", "own_schedules has no double"),
    ],
)
def test_schedules_of_their_own_that_no_run_could_resume(
    tmp_path: Path, name: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        run_checks.check_lr_schedule(own(tmp_path, name))


@pytest.mark.parametrize("steps", [1, 2, 1000, 2001, 2500])
def test_the_last_step_is_tried(tmp_path: Path, steps: int) -> None:
    run = own(tmp_path, "falls", "to = -1.0").with_steps(steps)
    with pytest.raises(ConfigError, match=f"its function returns -1.0 for step {steps - 1}"):
        run_checks.check_lr_schedule(run)


@pytest.mark.parametrize(
    ("name", "argument", "says"),
    [
        ("divides", "by = 2", "its function fails at step 2: ZeroDivisionError: division by zero"),
        ("falls", "to = nan", "its function returns nan for step 3"),
        ("falls", "to = -0.5", "its function returns -0.5 for step 3"),
    ],
)
def test_a_schedule_that_fails_while_a_run_trains(
    tmp_path: Path, name: str, argument: str, says: str
) -> None:
    """As at a step that was not tried before."""
    text = f'{RUN}[lr_schedule]\nbuild = "own_schedules:{name}"\n{argument}\n'
    run = load(tmp_path, text, steps=4, threads=1)
    run = run.model_copy(update={"output": str(tmp_path / "out")})
    with pytest.raises(ConfigError) as found:
        train(run, False)
    assert f"lr_schedule.build = 'own_schedules:{name}': {says}." in str(found.value)
    assert "\n" not in str(found.value)


def test_one_schedule_at_a_time(tmp_path: Path) -> None:
    text = RUN + '[lr_schedule]\nbuild = "own_schedules:halves"\nevery = 2\n'
    with pytest.raises(ConfigError, match=r"train.warmup = 5: has no effect where \[lr_schedule\]"):
        load(tmp_path, text, warmup=5)
    with pytest.raises(ConfigError, match=r"lr_schedule\.every = 2: has arguments, and no"):
        load(tmp_path, RUN + "[lr_schedule]\nevery = 2\n")
