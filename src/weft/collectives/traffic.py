"""What an algorithm sends and how long it takes: a step takes the latency of its slowest network,
and there the bytes that the busiest rank sends or gets over its bandwidth (Hockney 1994).

A link carries both ways at once, and a rank has one into each network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from weft.core import ConfigError, fill_formula

from .algorithm import CollectiveAlgorithm, Message

BETWEEN = "_between"  # after the symbols of the network between nodes


@dataclass(frozen=True)
class Links:
    """What joins the ranks.

    Args:
        latency_s: seconds of a message, within a node and between nodes.
        bandwidth_bps: bytes per second of a rank, each way, likewise.
        local: neighbouring ranks of a node; 0: all are in one.
    """

    latency_s: tuple[float, float]
    bandwidth_bps: tuple[float, float]
    local: int = 0

    def __post_init__(self) -> None:
        for option, values, least in (
            ("--latency", self.latency_s, "0 or more seconds"),
            ("--bandwidth", self.bandwidth_bps, "bytes per second above 0"),
        ):
            for value in values:
                if not 0 <= value < float("inf") or (value == 0 and "above" in least):
                    raise ConfigError(option, value, "not possible", f"give {least}")

    def network(self, message: Message) -> int:
        """0: the message stays within a node; 1: it goes between nodes."""
        if not self.local:
            return 0
        return int(message.source // self.local != message.target // self.local)


@dataclass(frozen=True)
class Traffic:
    """What an algorithm sends of a tensor of `size_bytes`, and how long that takes."""

    algorithm: CollectiveAlgorithm
    size_bytes: float
    links: Links

    @property
    def chunk_bytes(self) -> float:
        return self.size_bytes / self.algorithm.parts

    @cached_property
    def step_s(self) -> tuple[float, ...]:
        """Seconds of each step."""
        return tuple(self._seconds(step) for step in self.algorithm.steps)

    @cached_property
    def seconds(self) -> float:
        """Of all steps, one after the other."""
        return sum(self.step_s)

    @cached_property
    def sent_bytes(self) -> tuple[float, ...]:
        """Rank -> what it sends."""
        return self._count("source")

    @cached_property
    def received_bytes(self) -> tuple[float, ...]:
        """Rank -> what it gets."""
        return self._count("target")

    def _count(self, end: str) -> tuple[float, ...]:
        sides = [getattr(m, end) for step in self.algorithm.steps for m in step]
        return tuple(self.chunk_bytes * sides.count(rank) for rank in range(self.algorithm.ranks))

    def _seconds(self, step: tuple[Message, ...]) -> float:
        found = 0.0
        for network in (0, 1):
            there = [m for m in step if self.links.network(m) == network]
            busiest: dict[tuple[str, int], int] = {}
            for m in there:
                for port in (("out", m.source), ("in", m.target)):
                    busiest[port] = busiest.get(port, 0) + 1
            if there:
                wire = max(busiest.values()) * self.chunk_bytes / self.links.bandwidth_bps[network]
                found = max(found, self.links.latency_s[network] + wire)
        return found

    def formula(self) -> tuple[str, str] | None:
        """The algorithm's formula, and the same with its values. None where messages of several
        networks meet that it does not tell apart."""
        crossing = {self.links.network(m) for step in self.algorithm.steps for m in step}
        text = self.algorithm.formula
        if len(crossing) > 1 and BETWEEN not in text:
            return None
        first = 0 if BETWEEN in text or 0 in crossing else 1
        values: Mapping[str, float] = {
            "p": self.algorithm.ranks,
            "size": self.size_bytes,
            "latency": self.links.latency_s[first],
            "bandwidth": self.links.bandwidth_bps[first],
            f"latency{BETWEEN}": self.links.latency_s[1],
            f"bandwidth{BETWEEN}": self.links.bandwidth_bps[1],
            **self.algorithm.symbols,
        }
        return text, fill_formula(text, values)

    def figures(self) -> dict[str, object]:
        """What `weft draw --json` prints."""
        made, found = self.algorithm, self.formula()
        ends = [0]
        for phase in made.phases:
            ends.append(ends[-1] + len(phase.steps))
        return {
            "collective": made.name,
            "kind": made.kind,
            "ranks": made.ranks,
            "size_bytes": self.size_bytes,
            "chunk_bytes": self.chunk_bytes,
            "seconds": self.seconds,
            "formula": found and found[0],
            "phases": [
                {"name": phase.name, "steps": len(phase.steps), "seconds": sum(self.step_s[a:b])}
                for phase, a, b in zip(made.phases, ends, ends[1:])
            ],
            "sent_bytes": list(self.sent_bytes),
            "received_bytes": list(self.received_bytes),
        }


def traffic_of(algorithm: CollectiveAlgorithm, size_bytes: float, links: Links) -> Traffic:
    """Raises ConfigError for a size that is none."""
    if not 0 <= size_bytes < float("inf"):
        raise ConfigError("--size", size_bytes, "not a number of bytes", "give bytes, as in 100e6")
    return Traffic(algorithm, size_bytes, links)
