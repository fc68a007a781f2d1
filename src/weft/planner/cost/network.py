"""How long a collective takes over a group of ranks, whatever networks it spans. Closed form, over
arrays.

A group has `inside` members within one network of the innermost kind. What leaves it goes over the
rails of all of these: min(link, inside x rail), never one rail and never the link. Hops: a ring's,
or a tree's where that is sooner, as NCCL chooses (nccl-tests PERFORMANCE.md; NCCL's tuning.cc).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .hardware import Cluster, Era
from .layout_batch import Array, LayoutBatch

# NCCL's protocol LL128 over Simple (its tuning.cc): hops over NVLink of 1.9 in place of 3.4 us, and
# over the network of 4 in place of 14; 120 bytes of each 128 are data.
LL128_HOPS, LL128_RATE = (1.9 / 3.4, 4 / 14), 120 / 128


@dataclass(frozen=True)
class RankGroup:
    """The ranks of some axes, of each choice: `size`, and within a network of each tier `inside`
    (innermost first)."""

    size: Array
    inside: tuple[Array, ...]

    def beside(self, other: RankGroup) -> RankGroup:
        """The ranks that differ on the axes of either."""
        inside = tuple(a * b for a, b in zip(self.inside, other.inside, strict=True))
        return RankGroup(self.size * other.size, inside)


def choose_group(here: Array, first: RankGroup, second: RankGroup) -> RankGroup:
    """The first group where `here`, else the second."""
    inside = zip(first.inside, second.inside, strict=True)
    return RankGroup(
        np.where(here, first.size, second.size), tuple(np.where(here, a, b) for a, b in inside)
    )


@dataclass(frozen=True)
class Network:
    """What a cluster's networks do for one era of software."""

    cluster: Cluster
    era: Era

    def group(self, choices: LayoutBatch, *axes: str) -> RankGroup:
        """The ranks that differ on these axes."""
        inside = []
        for tier in self.cluster.hardware.tiers:
            width = tier.devices or self.cluster.devices
            near: Array = np.ones(len(choices))
            for axis in axes:
                near = near * np.clip(width // choices.strides[axis], 1, choices.sizes[axis])
            inside.append(near)
        return RankGroup(np.ones(len(choices)) * choices.size(*axes), tuple(inside))

    def _rate(self, index: int, kind: str) -> float:
        """Bytes per second of one device in a tier, in this kind of collective."""
        tier = self.cluster.hardware.tiers[index]
        return (
            tier.bps * (self.era.network if index else self.era.link) * tier.reaches.get(kind, 1.0)
        )

    def _ways(
        self, group: RankGroup, kind: str = "all_reduce"
    ) -> Sequence[tuple[float, Array, Array, Array]]:
        """Of each tier: bytes per second of one member's rail; members within the tier before it,
        where they are `parts` of this tier; whether the group needs it."""
        found, before = [], np.ones_like(group.size)
        for index, inside in enumerate(group.inside):
            found.append((self._rate(index, kind), before, inside / before, inside > before))
            before = inside
        return found

    def bandwidth(self, group: RankGroup, kind: str = "all_reduce") -> Array:
        """Bytes per second at which a ring over the group goes round."""
        best = np.full_like(group.size, np.inf)
        for rate, before, _, needed in self._ways(group, kind):
            best = np.where(needed, np.minimum(best, rate * before), best)
        return best

    def ring_hops(self, group: RankGroup, protocol: Sequence[float] = (1.0, 1.0)) -> Array:
        """Seconds of latency of one turn of a ring through all ranks: most of its steps are within
        a network, and as many cross each tier as it joins parts. `protocol`: its share of a hop
        within a node, and between nodes."""
        found, before = np.zeros_like(group.size), np.ones_like(group.size)
        for index, inside in enumerate(group.inside):
            hop = self.cluster.hardware.tiers[index].latency_s * protocol[min(index, 1)]
            found = found + hop * (group.size / before - group.size / inside)
            before = inside
        return found

    def hops(self, group: RankGroup) -> Array:
        """Seconds of latency of one turn of a ring: of a tree, where that is sooner."""
        tree = np.zeros_like(group.size)
        for tier, (_, _, parts, needed) in zip(
            self.cluster.hardware.tiers, self._ways(group), strict=True
        ):
            tree = tree + np.where(needed, np.log2(np.maximum(parts, 1)) * tier.latency_s, 0.0)
        return np.minimum(self.ring_hops(group), 2 * tree)

    def gather_s(
        self,
        nbytes: Array | float,
        group: RankGroup,
        kind: str = "all_gather",
        count: Array | float = 1.0,
    ) -> Array:
        """All-gathers, or reduce_scatters, `count` of them, of tensors of so many bytes in all.
        Between nodes NCCL has rings alone for these, of the protocol that is sooner."""
        wire = (group.size - 1) / group.size * nbytes / self.bandwidth(group, kind)
        took, apart = count * self.hops(group) + wire, group.size > group.inside[0]
        if apart.any():
            simple = count * self.ring_hops(group) + wire
            short = count * self.ring_hops(group, LL128_HOPS) + wire / LL128_RATE
            took = np.where(apart, np.minimum(simple, short), took)
        return np.where(group.size > 1, count * self.era.meet_s + took, 0.0)

    def reduce_s(self, nbytes: Array | float, group: RankGroup) -> Array:
        """An all-reduce of so many bytes, at a ring's bandwidth."""
        ring = 2 * (group.size - 1) / group.size * nbytes / self.bandwidth(group)
        return np.where(group.size > 1, self.era.meet_s + 2 * self.hops(group) + ring, 0.0)

    def exchange_s(self, nbytes: Array | float, group: RankGroup) -> Array:
        """An all-to-all in which each rank has so many bytes, equal parts for all: each network
        carries its share."""
        slowest, before = np.zeros_like(group.size), np.ones_like(group.size)
        for rate, before, parts, needed in self._ways(group, "all_to_all"):
            share = (before * parts - before) / group.size
            slowest = np.maximum(slowest, np.where(needed, share * nbytes / rate, 0.0))
        return np.where(group.size > 1, self.era.meet_s + self.hops(group) + slowest, 0.0)

    def send_s(self, nbytes: Array | float, choices: LayoutBatch, axis: str) -> Array:
        """A message to the neighbour on this axis, over the innermost network that holds them
        all."""
        stride, size = choices.strides[axis], choices.sizes[axis]
        found = np.zeros(len(choices))
        reached = np.zeros(len(choices), bool)
        for index, tier in enumerate(self.cluster.hardware.tiers):
            rate = self._rate(index, "send")
            # where only some neighbours are apart, their messages set the pace
            holds = stride * size <= (tier.devices or np.inf)
            found = np.where(~reached & holds, tier.latency_s + nbytes / rate, found)
            reached |= holds
        return np.where(size > 1, found, 0.0)
