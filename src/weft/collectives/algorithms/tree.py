"""Binomial trees: broadcast from rank 0, and all-reduce as a sum up to rank 0 and a broadcast.

Few steps, log2(p), each of the whole tensor: good for small tensors, where latency counts.

4 ranks       reduce       1 -> 0   3 -> 2   add         broadcast    0 -> 2            copy
                           2 -> 0            add                      0 -> 1   2 -> 3   copy
"""

from __future__ import annotations

from ..algorithm import CollectiveAlgorithm, Message, Phase

DOWN = "rounds x (latency + size / bandwidth)"  # rounds = log2(p), rounded up


def broadcast(ranks: int) -> CollectiveAlgorithm:
    """Every rank gets the tensor of rank 0."""
    phases = (Phase("broadcast", _down(ranks)),)
    return CollectiveAlgorithm("broadcast", "broadcast", ranks, 1, phases, DOWN, _rounds(ranks))


def tree(ranks: int) -> CollectiveAlgorithm:
    """Every rank gets the sum, by way of rank 0."""
    up = tuple(
        tuple(Message(child, parent, 0, "add") for parent, child, *_ in step)
        for step in reversed(_down(ranks))
    )
    phases = (Phase("reduce", up), Phase("broadcast", _down(ranks)))
    symbols = _rounds(ranks)
    return CollectiveAlgorithm("tree", "all_reduce", ranks, 1, phases, f"2 x {DOWN}", symbols)


def _down(ranks: int) -> tuple[tuple[Message, ...], ...]:
    """From rank 0 to all: in each step every rank that has the tensor sends it on."""
    steps = []
    for power in reversed(range(_rounds(ranks)["rounds"])):
        far = 2**power
        pairs = [(rank, rank + far) for rank in range(0, ranks - far, 2 * far)]
        steps.append(tuple(Message(parent, child, 0, "copy") for parent, child in pairs))
    return tuple(steps)


def _rounds(ranks: int) -> dict[str, int]:
    return {"rounds": (ranks - 1).bit_length()}


ALGORITHMS = {"tree": tree, "broadcast": broadcast}
