"""Hierarchical all-reduce: a reduce-scatter within each node, rings across nodes, an all-gather
within each node (as `[sync] name = "ring"` with `local`; Jia et al. 2018).

Of h nodes with l ranks, a rank sends 2 (h-1)/h of a part of 1/l to another node. In a flat ring one
rank of each node sends 2 (p-1)/p of the whole tensor there.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.core import ConfigError

from ..algorithm import CollectiveAlgorithm, Phase
from ._around import at_once, ring_turns


def hierarchical(ranks: int, local: int) -> CollectiveAlgorithm:
    """`local`: neighbouring ranks of a node. Raises ConfigError."""
    if local < 1 or ranks % local:
        problem = f"does not divide {ranks} ranks into nodes"
        raise ConfigError("--local", local, problem, f"give a divisor of {ranks}")
    nodes = ranks // local
    inside = [range(first, first + local) for first in range(0, ranks, local)]
    across = [range(place, ranks, local) for place in range(local)]

    def segment(place: int) -> range:
        return range(place * nodes, (place + 1) * nodes)

    # after the reduce-scatter, the rank at place i of its node has the sum of segment i + 1
    own = [_nth_of(segment((place + 1) % local)) for place in range(local)]
    pairs = [*zip(across, own, strict=True)]
    phases = (
        Phase(
            "reduce-scatter in nodes", at_once(*(ring_turns(r, 0, "add", segment) for r in inside))
        ),
        Phase("reduce-scatter across", at_once(*(ring_turns(r, 0, "add", o) for r, o in pairs))),
        Phase("all-gather across", at_once(*(ring_turns(r, 1, "copy", o) for r, o in pairs))),
        Phase("all-gather in nodes", at_once(*(ring_turns(r, 1, "copy", segment) for r in inside))),
    )
    return CollectiveAlgorithm(
        "hierarchical",
        "all_reduce",
        ranks,
        ranks,
        tuple(phase for phase in phases if phase.steps),
        "2 x (l - 1) x (latency + size / l / bandwidth)"
        " + 2 x (h - 1) x (latency_between + size / l / h / bandwidth_between)",
        {"l": local, "h": nodes},
    )


def _nth_of(chunks: range) -> Callable[[int], tuple[int]]:
    return lambda place: (chunks[place],)


ALGORITHMS = {"hierarchical": hierarchical}
