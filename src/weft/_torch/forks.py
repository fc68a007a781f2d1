"""Whether forked processes can use CUDA. `torch.cuda` says so in a child alone, under a private
name."""

from __future__ import annotations

import os

import torch


def cuda_survives_fork() -> bool:
    """Whether a process that is forked now can use CUDA. Found out by a fork: even the question
    whether CUDA is available, asked without NVML, uses it, and leaves no trace in the parent."""
    child = os.fork()
    if child == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitpid(child, 0)[1] == 0
