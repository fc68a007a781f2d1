"""Parts of schedules: placements, sequences of actions over the microbatches, and ways to
interleave them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat, zip_longest
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core import Action, ConfigError, Kind, Schedule

Array = NDArray[Any]


class ScheduleSummary(NamedTuple):
    """Bubble and memory of a schedule in closed form, under the conditions that its `build` states.

    `idle_s`: seconds that a rank waits in a step, if all ranks take equally long. `first`, `last`:
    microbatches whose activations the first and the last rank hold at once. Functions compute them
    from arrays of p ranks, m microbatches, v stages of a rank, and seconds of `forward`, `backward`
    and `weight` of all stages of a rank."""

    idle_s: Array
    first: Array
    last: Array


def split_backward_idle(
    idle: Array, p: Array, m: Array, v: Array, forward: Array, backward: Array, weight: Array
) -> Array:
    """Idle time of schedules that split B from W. It is above `idle` for few microbatches: the
    first one has to pass all ranks twice, and each other one takes at least a stage's longest
    action."""
    longest = np.maximum(forward, np.maximum(backward, weight)) / v
    alone = p * (forward + backward) + weight / v + (m - 1) * longest
    return np.maximum(idle, alone - m * (forward + backward + weight))


def round_robin_placement(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Placement of `chunks` stages per rank: stage s is on rank s % ranks. Raises ConfigError."""
    if type(chunks) is not int or chunks < 1:
        raise ConfigError(
            "pipeline.chunks", chunks, "not a number of stages per rank", "use 1 or more"
        )
    return tuple(range(ranks)) * chunks


def microbatch_sweep(
    kind: Kind, rank: int, ranks: int, microbatches: int, chunks: int = 1, group: int | None = None
) -> list[Action | None]:
    """All F, B, W or U of one rank in the round-robin placement, in order: `group` microbatches
    (default: all) through one chunk, the same through the next, then the next group. F begins with
    the first chunk, the others with the last.

    If the last group is not full, None stands for each missing microbatch. A valid schedule stays
    valid without whole microbatches, so every number of microbatches works.
    """
    stages = range(rank, ranks * chunks, ranks)
    group = group or microbatches
    found: list[Action | None] = []
    for start in range(0, microbatches, group):
        existing = range(start, min(start + group, microbatches))
        for stage in stages if kind == "F" else reversed(stages):
            found += map(Action._make, zip(repeat(kind), repeat(stage), existing))
            found += repeat(None, group - len(existing))
    return found


def interleave_columns(*columns: tuple[int, Sequence[Action | None]]) -> tuple[Action, ...]:
    """One rank's order from columns (delay, actions). Row r of a column is actions[r - delay]; rows
    are read from left to right, top to bottom. So the delay of B is the number of forwards in
    flight before the first B.
    """
    rows = zip_longest(*(chain(repeat(None, delay), actions) for delay, actions in columns))
    return tuple(filter(None, chain.from_iterable(rows)))


def v_schedule(
    name: str, ranks: int, microbatches: int, program: Callable[[int, int], Iterable[str]]
) -> Schedule:
    """Two stages per rank in V: rank i has stage i, its chunk 0, and stage 2 ranks - 1 - i, its
    chunk 1.

    `program(rank, microbatches)` yields words: a kind and a chunk, "F0", "B1", for the next
    microbatch; "b0", "b1" for a B whose W comes later; "W" for the oldest W that is still due. It
    is called with at least 2 * ranks microbatches; the surplus is left out, as in
    `microbatch_sweep`.
    """
    total = max(microbatches, 2 * ranks)

    def order(rank: int) -> Iterator[Action]:
        coming = {
            f"{kind}{chunk}": map(Action, repeat(kind), repeat(stage), range(total))
            for chunk, stage in enumerate((rank, 2 * ranks - 1 - rank))
            for kind in ("F", "B")
        }
        waiting: deque[Action] = deque()
        for word in program(rank, total):
            if word == "W":
                action = waiting.popleft()
            else:
                action = next(coming[word.upper()])
                if word[0] == "b":
                    waiting.append(action._replace(kind="W"))
            if action.microbatch < microbatches:
                yield action

    return Schedule(
        name, (*range(ranks), *reversed(range(ranks))), tuple(tuple(order(r)) for r in range(ranks))
    )
