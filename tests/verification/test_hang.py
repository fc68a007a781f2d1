"""A rank that is stuck is named, and verify ends."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from tests.cases import VOCAB, Subject, tokens
from weft.losses import next_token
from weft.train.watchdog import LEAST_S, RARE_S, TIMES, Watchdog
from weft.verification.verify_model import verify_case


class Stuck(nn.Module):
    """Waits on rank 1, for what does not come."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        several = dist.is_initialized() and dist.get_world_size() > 1
        if several and dist.get_rank() == 1 and input_ids.device.type == "cpu":
            time.sleep(1000)
        return self.head(self.embedding(input_ids))


def test_a_rank_that_is_stuck_in_its_forward(capfd: Any) -> None:
    case = replace(Subject(Stuck, tokens, next_token).case(), hang_s=3.0)
    report = verify_case(case, ["dp2"])
    assert not report.passed
    assert "hangs (rank " in report.text()
    said = capfd.readouterr().err
    assert "no progress for 3 s: rank 1 is in no collective, and is waited for" in said
    assert "test_hang.py" in said and "time.sleep(1000)" in said


def test_the_limit_follows_from_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("weft.train.watchdog.time.monotonic", lambda: now[0])
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
