"""Chain: which part of a model a stage of a pipeline holds, in closed form: the first, the last, and those between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from .. import schedule
from .choices import Array, Choices
from .work import Block, Work


@dataclass(frozen=True)
class Stage:
    """Of each choice: how many of the repeated blocks a rank holds, over all of them; and whether (0 or 1) it has what
    is before and after these."""

    layers: Array
    before: Array
    after: Array

    def holds(self, work: Work) -> Sequence[tuple[Block, Array]]:
        """Blocks, and how many of each a rank of it has."""
        before, repeated, after = parts(work)
        return [
            *((block, block.count * self.before) for block in before),
            *((block, block.count * self.layers) for block in repeated),
            *((block, block.count * self.after) for block in after),
        ]


def parts(work: Work) -> tuple[list[Block], list[Block], list[Block]]:
    """What is before the repeated blocks, these, and what is after; what stands between two of them is theirs."""
    places = [i for i, block in enumerate(work.blocks) if block.repeated] or [0, len(work.blocks) - 1]
    first, last = places[0], places[-1]
    return list(work.blocks[:first]), list(work.blocks[first : last + 1]), list(work.blocks[last + 1 :])


def runs_again(work: Work, choices: Choices) -> tuple[Array, Array]:
    """The share of a rank's repeated blocks that run again, where every k-th of the model does: the most that a stage
    has of them, and the least."""
    p, chunks = choices.sizes["pp"], choices.chunks
    each = np.maximum(1.0, max(1, work.depth) * stages(work, choices)[1].layers / np.where(p > 1, chunks, 1))
    most = np.minimum(1.0, np.ceil(each * choices.again - 1e-9) / each)
    return most, np.where(p > 1, np.floor(each * choices.again + 1e-9) / each, most)


@cache
def vee(name: str) -> bool:
    """Whether stages of this schedule go down the ranks and come back. Raises ConfigError for an unknown name."""
    return schedule.make(name, 2, 1).placement[:4] == (0, 1, 1, 0)


def stages(work: Work, choices: Choices) -> tuple[Stage, Stage, Stage]:
    """The first rank of the pipeline, one between, and the last. Blocks are dealt out evenly; where they do not divide,
    the ends, which have more to do, hold one less. Of a V, the first rank has both ends of the model."""
    p, depth = choices.sizes["pp"], max(1, work.depth)
    each = p * choices.chunks
    even = (depth % each == 0) | (work.depth == 0)  # what has no repeated blocks is dealt out whole
    most = np.where(even, depth / p, np.ceil((depth + 2) / each) * choices.chunks)
    least = np.where(even, most, np.maximum(most - 1, 0))
    one, none, whole = np.ones(len(choices)), np.zeros(len(choices)), p == 1
    ends = np.where(whole, 1.0, least / depth)
    folded = np.array([vee(name) for name in choices.schedules])[choices.schedule]
    return (
        Stage(ends, one, np.where(whole | folded, 1.0, 0.0)),
        Stage(np.where(whole, 1.0, most / depth), np.where(whole, 1.0, none), np.where(whole, 1.0, none)),
        Stage(ends, np.where(whole, 1.0, 0.0), np.where(whole | ~folded, 1.0, 0.0)),
    )
