"""What a GPU's memory holds, and where it was allocated: torch has no public way to record it."""

from __future__ import annotations

import pickle

import torch


def record_allocations(most: int) -> None:
    """Record each allocation from now on, with the Python stack that made it; at most so many
    events, the latest."""
    torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=most)


def end_recording() -> None:
    """Record no longer; what was recorded is forgotten."""
    torch.cuda.memory._record_memory_history(None)


def memory_snapshot() -> bytes:
    """What is allocated now and what was recorded, as pytorch.org/memory_viz reads it."""
    return pickle.dumps(torch.cuda.memory._snapshot())
