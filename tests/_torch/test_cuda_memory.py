"""What torch must keep doing for weft._torch.cuda_memory: here without a GPU, by what it calls."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from weft._torch.cuda_memory import end_recording, memory_snapshot, record_allocations


def test_allocations_are_recorded_with_their_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def record(*given: Any) -> None:
        calls.append(given)

    monkeypatch.setattr(torch._C, "_cuda_record_memory_history", record, raising=False)
    record_allocations(7)
    end_recording()
    (enabled, context, stacks, most, *_), (ended, *_) = calls
    assert (enabled, context, stacks, most) == ("all", "all", "python", 7)
    assert ended is None


def test_a_snapshot_is_a_pickle_of_what_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"segments": [], "device_traces": [[]]}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: held)
    assert pickle.loads(memory_snapshot()) == held
