"""Ring all-reduce (Patarasuk & Yuan 2009): a reduce-scatter round the ring, then an all-gather.

Each rank sends 2 (p-1)/p of the tensor, whatever p is. Also its two halves as collectives of their
own.

3 ranks       reduce-scatter   0 -> 1 chunk 0   1 -> 2 chunk 1   2 -> 0 chunk 2     add
                               0 -> 1 chunk 2   1 -> 2 chunk 0   2 -> 0 chunk 1     add
              all-gather       0 -> 1 chunk 1   1 -> 2 chunk 2   2 -> 0 chunk 0     copy
                               0 -> 1 chunk 0   1 -> 2 chunk 1   2 -> 0 chunk 2     copy
"""

from __future__ import annotations

from ..algorithm import CollectiveAlgorithm, Phase
from ._around import ring_turns

HALF = "(p - 1) x (latency + size / p / bandwidth)"


def ring(ranks: int) -> CollectiveAlgorithm:
    """After the first half rank r has the sum of chunk r + 1, as in `[sync] name = "ring"`."""
    everyone = range(ranks)
    phases = (
        Phase("reduce-scatter", tuple(ring_turns(everyone, 0, "add"))),
        Phase("all-gather", tuple(ring_turns(everyone, 1, "copy"))),
    )
    return CollectiveAlgorithm("ring", "all_reduce", ranks, ranks, phases, f"2 x {HALF}")


def reduce_scatter(ranks: int) -> CollectiveAlgorithm:
    """Rank r gets the sum of chunk r."""
    steps = tuple(ring_turns(range(ranks), -1, "add"))
    phases = (Phase("reduce-scatter", steps),)
    return CollectiveAlgorithm("reduce_scatter", "reduce_scatter", ranks, ranks, phases, HALF)


def all_gather(ranks: int) -> CollectiveAlgorithm:
    """Every rank gets the chunks of all."""
    steps = tuple(ring_turns(range(ranks), 0, "copy"))
    phases = (Phase("all-gather", steps),)
    return CollectiveAlgorithm("all_gather", "all_gather", ranks, ranks, phases, HALF)


ALGORITHMS = {"ring": ring, "reduce_scatter": reduce_scatter, "all_gather": all_gather}
