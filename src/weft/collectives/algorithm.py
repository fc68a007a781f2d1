"""CollectiveAlgorithm: in each step, which rank sends which chunk to which. Pure data; no torch.

    ring, 2 ranks      reduce-scatter   0 -> 1 chunk 0 add     1 -> 0 chunk 1 add
                       all-gather       0 -> 1 chunk 1 copy    1 -> 0 chunk 0 copy

What a collective promises follows from its kind alone (`held_before`, `held_after`); checking,
timing and drawing an algorithm follow from its messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

CollectiveKind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"]
Held = Mapping[int, frozenset[int]]  # chunk -> the ranks whose input is summed in it


class Message(NamedTuple):
    """A rank sends a chunk as it has it when the step begins. "add": the receiver adds it to its
    own; "copy": it takes its place."""

    source: int
    target: int
    chunk: int
    op: Literal["add", "copy"]


class Phase(NamedTuple):
    """Steps with one purpose. The messages of a step are sent at the same time."""

    name: str
    steps: tuple[tuple[Message, ...], ...]


@dataclass(frozen=True)
class CollectiveAlgorithm:
    """One way to run a collective over `ranks` ranks.

    Args:
        name: of the algorithm.
        kind: what it does.
        ranks: number of ranks.
        chunks: number of chunks, of equal size, that the messages name.
        phases: its steps.
        formula: seconds, of `p` ranks, `size` bytes, `latency` seconds and `bandwidth` bytes per
            second, where all links are alike; of `symbols` too.
        symbols: further numbers of the formula.
    """

    name: str
    kind: CollectiveKind
    ranks: int
    chunks: int
    phases: tuple[Phase, ...]
    formula: str
    symbols: Mapping[str, int] = field(default_factory=dict)

    @property
    def steps(self) -> tuple[tuple[Message, ...], ...]:
        return tuple(step for phase in self.phases for step in phase.steps)

    @property
    def sums(self) -> bool:
        """Whether inputs of several ranks are added."""
        return self.kind in ("all_reduce", "reduce_scatter")

    @property
    def parts(self) -> int:
        """Number of chunks in the whole tensor: that of one rank, or, of an all-gather, of all
        together. An all-to-all has other chunks on every rank."""
        return self.ranks if self.kind == "all_to_all" else self.chunks

    def chunk_name(self, chunk: int) -> str:
        """The chunk's number; of an all-to-all, from which rank to which it goes."""
        if self.kind != "all_to_all":
            return str(chunk)
        source, target = divmod(chunk, self.ranks)
        return f"{source}>{target}"


def held_before(kind: CollectiveKind, ranks: int, chunks: int) -> list[Held]:
    """What each rank holds before the first step."""
    match kind:
        case "all_reduce" | "reduce_scatter":
            return [{c: frozenset({rank}) for c in range(chunks)} for rank in range(ranks)]
        case "all_gather":
            return [{rank: frozenset({rank})} for rank in range(ranks)]
        case "all_to_all":
            own = [range(rank * ranks, (rank + 1) * ranks) for rank in range(ranks)]
            return [{c: frozenset({rank}) for c in own[rank]} for rank in range(ranks)]
        case "broadcast":
            return [dict.fromkeys(range(chunks if r == 0 else 0), _of(0)) for r in range(ranks)]


def held_after(kind: CollectiveKind, ranks: int, chunks: int) -> list[Held]:
    """What each rank must hold after the last step, beside anything else."""
    everyone = frozenset(range(ranks))
    match kind:
        case "all_reduce":
            return [dict.fromkeys(range(chunks), everyone)] * ranks
        case "reduce_scatter":
            return [{rank: everyone} for rank in range(ranks)]
        case "all_gather":
            return [{c: _of(c) for c in range(ranks)}] * ranks
        case "all_to_all":
            return [{r * ranks + rank: _of(r) for r in range(ranks)} for rank in range(ranks)]
        case "broadcast":
            return [dict.fromkeys(range(chunks), _of(0))] * ranks


def _of(rank: int) -> frozenset[int]:
    return frozenset({rank})
