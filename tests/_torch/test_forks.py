"""What torch must keep doing for weft._torch.forks."""

from __future__ import annotations

import pytest
import torch

from weft._torch.forks import cuda_survives_fork


def test_it_is_a_child_that_torch_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.cuda._is_in_bad_fork() is False  # the name that torch has for it
    assert cuda_survives_fork() is not torch.cuda.is_initialized()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert not cuda_survives_fork()
