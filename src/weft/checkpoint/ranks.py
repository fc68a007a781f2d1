"""Errors that are raised on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from weft.core import CheckpointError, DamagedCheckpoint, gather_json

_KINDS = {kind.__name__: kind for kind in (CheckpointError, DamagedCheckpoint)}


def rank_and_world() -> tuple[int, int]:
    """(rank, world) of the default group; one process where there is none."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


@contextmanager
def raise_on_every_rank(
    path: Path, fix: str, group: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """An error that one rank raises in this block is raised on every rank as a CheckpointError. The
    end of the block is a barrier."""
    cause: Exception | None = None
    facts: tuple[str, str, object, str, str] | None = None
    try:
        yield
    except CheckpointError as error:
        value = (
            error.value if isinstance(error.value, str | int | float | None) else str(error.value)
        )
        facts = (type(error).__name__, error.field, value, error.problem, error.fix)
        cause = error
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        problem = f"rank {rank_and_world()[0]} failed: {type(error).__name__}: {error}"
        cause, facts = error, (CheckpointError.__name__, "checkpoint", str(path), problem, fix)
    failed = [each for each in gather_json(facts, group) if each is not None]
    if failed:
        kind, *told = failed[0]
        raise _KINDS[kind](*told) from cause
