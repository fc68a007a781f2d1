"""Turns of a ring."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from ..algorithm import Message


def ring_turns(
    members: Sequence[int],
    first: int,
    op: Literal["add", "copy"],
    chunks: Callable[[int], Iterable[int]] = lambda segment: (segment,),
) -> Iterator[tuple[Message, ...]]:
    """The p - 1 turns of a ring of p members, of a tensor of p segments: in turn t member i sends
    segment i + first - t to the next one.

    Args:
        members: the ranks, in the order of the ring.
        first: the distance from a member to the segment that it sends first.
        op: what the next one does with it.
        chunks: the chunks of a segment; default: it is one.
    """
    p = len(members)
    for turn in range(p - 1):
        yield tuple(
            Message(member, members[(i + 1) % p], chunk, op)
            for i, member in enumerate(members)
            for chunk in chunks((i + first - turn) % p)
        )


def at_once(*rings: Iterable[tuple[Message, ...]]) -> tuple[tuple[Message, ...], ...]:
    """Rings of the same size that turn at the same time."""
    return tuple(tuple(m for step in steps for m in step) for steps in zip(*rings, strict=True))
