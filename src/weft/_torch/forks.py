"""Whether forked processes can use CUDA, and autograd. `torch.cuda` says so in a child alone, under
a private name."""

from __future__ import annotations

import os
from functools import cache

import torch


def cuda_survives_fork() -> bool:
    """Whether a process that is forked now can use CUDA. Found out by a fork: even the question
    whether CUDA is available, asked without NVML, uses it, and leaves no trace in the parent."""
    child = os.fork()
    if child == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitpid(child, 0)[1] == 0


@cache
def start_autograd_without_gpus() -> None:
    """Where no GPU is visible, let autograd find that out. It looks once, in the first backward of
    a process; a FakeTensorMode puts a stand-in for a GPU into a CUDA build of torch, for which that
    backward would start a thread, and no process that is forked later could run one."""
    if not torch.cuda.device_count():
        with torch.enable_grad():
            torch.ones((), requires_grad=True).backward()


def autograd_survives_fork() -> bool:
    """Whether a process that is forked now can run a backward, on any device. Where GPUs are
    visible, the first backward of a process starts a thread for each, even one on the CPU."""
    child = os.fork()
    if child == 0:
        try:
            torch.ones((), requires_grad=True).backward()
        except RuntimeError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0
