"""A rank that is stuck is named, and verify ends."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from tests.cases import VOCAB, Subject, tokens
from weft.core.errors import WorkerDied
from weft.launch import rank_process, watchdog as watchdog_file
from weft.launch.local_workers import run_workers
from weft.launch.watchdog import LEAST_S, RARE_S, TIMES, Watchdog
from weft.losses import next_token
from weft.verification.compare import hang_s, start_s
from weft.verification.reference import Reference
from weft.verification.verify_model import verify_case


class Stuck(nn.Module):
    """Waits on rank 1, for what does not come."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        several = dist.is_initialized() and dist.get_world_size() > 1
        x = self.embedding(input_ids)
        has_elements = type(x) is Tensor and x.device.type == "cpu"  # else it is planned
        if several and dist.get_rank() == 1 and has_elements:
            time.sleep(1000)
        return self.head(x)


def test_a_rank_that_is_stuck_in_its_forward(capfd: Any) -> None:
    case = replace(Subject(Stuck, tokens, next_token).case(), hang_s=3.0)
    report = verify_case(case, ["dp2"])
    assert not report.passed
    assert "hangs (rank " in report.text()
    said = capfd.readouterr().err
    assert (
        "no progress for 3 s: rank 1 is in no collective, and the other ranks wait for it"
    ) in said
    assert "test_hang.py" in said and "time.sleep(1000)" in said


class StuckInBuild(nn.Sequential):
    """On rank 1 it is never made."""

    def __init__(self) -> None:
        if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() == 1:
            time.sleep(1000)  # in its making
        super().__init__(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids)


def test_a_rank_that_is_stuck_before_the_first_step(capfd: Any) -> None:
    case = replace(Subject(StuckInBuild, tokens, next_token).case(), hang_s=0.3)
    report = verify_case(case, ["dp2"])
    assert "hangs (rank " in report.text()
    said = capfd.readouterr().err
    assert (
        "no progress for 3 s: rank 1 is in no collective, and the other ranks wait for it"
    ) in said
    assert "rank 1: after it began building the model, is in no collective, but at" in said
    assert "test_hang.py" in said and "time.sleep(1000)  # in its making" in said


@pytest.mark.parametrize(
    ("built_s", "took_s", "step_s", "begin_s"),
    [
        (0.1, [0.2, 0.1], 60.0, 120.0),
        (2.0, [28.0, 0.1], 300.0, 300.0),  # the first step is of its own
        (2.0, [4.0, 5.0, 6.0], 240.0, 120.0),
    ],
)
def test_the_limit_follows_from_the_reference(
    built_s: float, took_s: list[float], step_s: float, begin_s: float
) -> None:
    case = Subject(Stuck, tokens, next_token).case()
    reference = Reference((), built_s=built_s, took_s=took_s)
    assert hang_s(case, "dp2", reference) == pytest.approx(step_s)
    assert start_s(case, "dp2", reference) == pytest.approx(begin_s)
    assert hang_s(replace(case, hang_s=7.0), "dp2", reference) == 7.0
    assert start_s(replace(case, hang_s=7.0), "dp2", reference) is None


def idle() -> None:
    """What a rank does that has come."""


def test_a_rank_that_does_not_come_to_where_ranks_meet(
    tmp_path: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*arguments: Any, **options: Any) -> None:
        if options["rank"] == 1:
            time.sleep(1000)
        options["store"].wait(["never"])

    monkeypatch.setattr(rank_process.dist, "init_process_group", connect)  # ranks are forked
    with pytest.raises(WorkerDied, match="exited with code 3"):
        run_workers(idle, 2, hang_s=0.3)
    said = capfd.readouterr().err
    assert "no progress for 3 s" in said
    assert "rank 1: after the start" in said and "time.sleep(1000)" in said


def test_a_rank_that_works_alone_is_waited_for_as_long_as_it_takes() -> None:
    assert run_workers(build_slowly, 2, hang_s=0.1) == [True, True]


def build_slowly() -> bool:
    with Watchdog(0.1) as start, start.starting():
        with start.alone("building"):
            time.sleep(2.5)
        dist.barrier()
    return True


def rare_on_rank_0(seconds: float) -> bool:
    with Watchdog(1.2) as watchdog:
        for step in range(4):
            if dist.get_rank() == 0:
                with watchdog.rare():
                    time.sleep(seconds if step == 1 else 0.0)
            dist.barrier()
            watchdog.beat(f"step {step}")
    return True


def test_what_is_rare_on_one_rank_may_take_longer_and_not_for_ever(capfd: Any) -> None:
    assert run_workers(rare_on_rank_0, 2, 6.0) == [True, True]
    assert capfd.readouterr().err == ""
    with pytest.raises(WorkerDied, match="exited with code 3"):
        run_workers(rare_on_rank_0, 2, 100.0)
    said = capfd.readouterr().err
    assert (
        "no progress for 12 s: rank 0 is in no collective, and the other ranks wait for it"
    ) in said


def test_the_limit_follows_from_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(watchdog_file.time, "monotonic", lambda: now[0])
    watchdog, found = Watchdog(None), []
    for took in (100.0, 1.0, 1.0, 4.0, *[1.0] * 50):
        found.append(watchdog.limit_s)
        now[0] += took
        watchdog.beat("a step")
    assert found[:4] == [RARE_S, RARE_S, RARE_S, TIMES * 100.0]
    assert watchdog.limit_s == LEAST_S  # of the last steps
    with watchdog.rare():
        assert watchdog.limit_s == RARE_S
        now[0] += 300.0
    watchdog.beat("a checkpoint")
    assert watchdog.limit_s == LEAST_S
    assert Watchdog(7.0).limit_s == 7.0
    for limit_s, rare_s in ((7.0, 70.0), (90.0, RARE_S), (900.0, 900.0)):
        watchdog = Watchdog(limit_s)
        with watchdog.rare():
            assert watchdog.limit_s == rare_s
