"""What torch must keep doing for weft._torch.forks."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from weft._torch.forks import autograd_survives_fork, cuda_survives_fork
from weft.launch import local_workers


def test_it_is_a_child_that_torch_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.cuda._is_in_bad_fork() is False  # the name that torch has for it
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    assert cuda_survives_fork()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert not cuda_survives_fork()


def test_a_child_tries_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.ones((), requires_grad=True).backward()  # no GPU, so no thread of one
    assert autograd_survives_fork()

    def refuse(self: torch.Tensor) -> None:
        raise RuntimeError("Unable to handle autograd's threading")

    monkeypatch.setattr(torch.Tensor, "backward", refuse)
    assert not autograd_survives_fork()
    assert local_workers._context("gloo").get_start_method() == "spawn"
    monkeypatch.undo()
    assert local_workers._context("gloo").get_start_method() == "fork"


def test_a_backward_of_fake_tensors_starts_no_thread() -> None:
    """In a CUDA build of torch on a machine without a GPU, it would start one."""
    code = """
import torch
from weft._torch.forks import autograd_survives_fork
from weft._torch.tensors import fake_mode
with fake_mode():
    torch.ones(2, requires_grad=True).sum().backward()
assert autograd_survives_fork()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
