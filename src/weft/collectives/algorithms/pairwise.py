"""All-to-all by turns: in turn t every rank sends to the one t places on what is for that one.

Each rank sends (p-1)/p of its tensor.
"""

from __future__ import annotations

from ..algorithm import CollectiveAlgorithm, Message, Phase


def all_to_all(ranks: int) -> CollectiveAlgorithm:
    """Rank j gets the j-th part of every rank's tensor. Chunk i p + j is what rank i has for j."""
    steps = tuple(
        tuple(
            Message(rank, other, rank * ranks + other, "copy")
            for rank in range(ranks)
            for other in [(rank + turn) % ranks]
        )
        for turn in range(1, ranks)
    )
    formula = "(p - 1) x (latency + size / p / bandwidth)"
    phases = (Phase("all-to-all", steps),)
    return CollectiveAlgorithm("all_to_all", "all_to_all", ranks, ranks**2, phases, formula)


ALGORITHMS = {"all_to_all": all_to_all}
