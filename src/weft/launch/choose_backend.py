"""Which backend the ranks of a host communicate by, and so which device they compute on."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from weft.core import BackendChoice, ConfigError, RunConfig

Backend = Literal["gloo", "nccl"]  # on the CPU, or on a GPU for each rank


def backend_of_run(run: RunConfig, ranks: int) -> Backend:
    """That of a run, of which this host has so many ranks. Raises ConfigError."""
    if not run.workers:
        return choose_backend(run.train.backend, ranks)
    if run.train.backend not in ("auto", "gloo"):
        problem = "workers by name and their driver run on the CPU"
        raise ConfigError("train.backend", run.train.backend, problem, 'use "gloo"')
    return "gloo"


def choose_backend(asked: BackendChoice, ranks: int, field: str = "train.backend") -> Backend:
    """NCCL if every rank of this host has a GPU of its own, else gloo, unless one is asked for.

    Args:
        asked: "auto", "gloo", or "nccl" by either of its names.
        ranks: how many ranks this host has.
        field: what a refusal calls the choice.

    Raises:
        ConfigError: torch was built without the backend, or this host has no GPU for each rank.
    """
    gpus = torch.cuda.device_count()
    if asked == "auto":
        return "nccl" if gpus >= ranks and dist.is_nccl_available() else "gloo"
    if asked == "gloo":
        return "gloo"
    if not dist.is_nccl_available():
        problem = f"torch {torch.__version__} is built without NCCL"
        raise ConfigError(field, asked, problem, 'use "gloo", or a torch that is built for CUDA')
    if gpus < ranks:
        problem = f"NCCL needs a GPU for each rank, and this host has {gpus} for {ranks}"
        fix = f'use "gloo", which computes on the CPU{", or fewer ranks" if gpus else ""}'
        raise ConfigError(field, asked, problem, fix)
    return "nccl"
