"""Sides that are measured in turn, each alone on the devices, in rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from setting import Setting, Size
from torch import Tensor

from weft.core import WorkerDied
from weft.launch import Pool
from weft.train import peak_memory_bytes

WARMUP, STEPS = 4, 12
NO_ROOM = ("OutOfMemoryError", "out of memory")
Ranks = list[dict[str, Any]]  # what each rank measured


def timed(setting: Setting, step: Callable[[], Tensor | float]) -> dict[str, Any]:
    """A rank's steps: seconds, losses, and the most bytes that its device held."""
    losses = [float(step()) for _ in range(WARMUP)]
    times = [setting.seconds(step) for _ in range(2 if setting.small else STEPS)]
    losses.append(float(step()))
    return {"times": times, "losses": losses, "peak": peak_memory_bytes(setting.device)}


def slowest(ranks: Ranks) -> list[float]:
    """Seconds of each step, which lasts until the slowest rank is done."""
    return [max(times) for times in zip(*(rank["times"] for rank in ranks))]


def in_rounds(
    setting: Setting,
    size: Size,
    rounds: Sequence[Sequence[Any]],
    run: Callable[[Pool, Size, Any], Ranks],
) -> tuple[Size, list[dict[Any, Ranks]]]:
    """The size that there was room for, and of each round what each side gave.

    Args:
        setting: the devices; with `small` one round is enough.
        size: the largest to try.
        rounds: the sides of each round, in its order.
        run: measures one side.
    """
    found = list[dict[Any, Ranks]]()
    with setting.pool() as pool:
        for sides in rounds[:1] if setting.small else rounds:

            def one(each: Size, sides: Sequence[Any] = sides) -> dict[Any, Ranks]:
                return {side: run(pool, each, side) for side in sides}

            used, result = with_room(size, one)
            if used != size:
                found, size = [], used
            found.append(result)
    return size, found


def with_room(size: Size, run: Callable[[Size], Any]) -> tuple[Size, Any]:
    """What `run` gives of the size, or of the next smaller one that has room."""
    tried: Size | None = size
    while tried is not None:
        try:
            return tried, run(tried)
        except WorkerDied as problem:
            if not any(word in str(problem) for word in NO_ROOM):
                raise
            print(f"no room for {tried}", flush=True)
            tried = tried.smaller()
    raise RuntimeError(f"no room for any of {size}")
