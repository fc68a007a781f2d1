"""Collectives of Python objects, and errors that are raised on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from weft.core import (
    CheckpointError,
)


def rank_and_world() -> tuple[int, int]:
    """(rank, world) of the default group; one process where there is none."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def all_gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks, in rank order."""
    values = [value] * rank_and_world()[1]
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks, in rank order, on rank 0; an empty list on others."""
    rank, world = rank_and_world()
    values = [value] * world if rank == 0 else []
    if world > 1:
        dist.gather_object(value, values or None, group=group)
    return values


@contextmanager
def raise_on_every_rank(
    path: Path, fix: str, group: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """An error that one rank raises in this block is raised on every rank as a CheckpointError. The
    end of the block is a barrier."""
    cause: Exception | None = None
    facts: tuple[type[CheckpointError], str, object, str, str] | None = None
    try:
        yield
    except CheckpointError as error:
        cause, facts = error, (type(error), error.field, error.value, error.problem, error.fix)
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        problem = f"rank {rank_and_world()[0]} failed: {type(error).__name__}: {error}"
        cause, facts = error, (CheckpointError, "checkpoint", str(path), problem, fix)
    failed = [each for each in all_gather(facts, group) if each is not None]
    if failed:
        kind, *told = failed[0]
        raise kind(*told) from cause
