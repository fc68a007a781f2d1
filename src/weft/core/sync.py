"""Sync: how the replicas on `dp` stay together, as data. Three kinds, by when they agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .codec import Codec, ReplicaView

Route = Literal["backend", "ring", "owners"]

TIMEOUT_S = 60.0
BUCKET_BYTES = 25 * 2**20  # of gradients that are reduced together
ROUNDS = 2  # a codec's rounds: the second must not queue up behind the next bucket's first


@dataclass(frozen=True)
class SyncEveryStep:
    """Gradients are summed in every step, so replicas stay equal.

    `route`: how: the backend's collectives; a ring of messages, the ranks of `local` neighbours
    first where that is more than one; or to the `owners`, the first `servers` replicas, which alone
    update what they own and send weights back.
    """

    name: str
    codec: Codec
    route: Route = "backend"
    servers: int = 0
    local: int = 1
    bucket_bytes: int = BUCKET_BYTES

    @property
    def plain(self) -> bool:
        """Whether this is the backend's all-reduce of gradients as they are."""
        return self.route == "backend" and self.codec.name == "identity"

    def peers(self, size: int, index: int = 0) -> ReplicaView:
        """How a codec sees the `size` replicas. Owners sum for all by themselves."""
        return ReplicaView(size, index, sharded=self.route != "owners")

    def groups(self, size: int) -> list[list[list[int]]]:
        """The process groups that it takes, each time all `size` replicas in parts. Of the
        backend's: one for each round of a codec. Of a ring: all, those on one host, those in the
        same place on all hosts."""
        everyone = [list(range(size))]
        if self.route == "backend":
            return [everyone] * ROUNDS
        if self.route == "owners" or self.local == 1:
            return [everyone]
        hosts = [everyone[0][first : first + self.local] for first in range(0, size, self.local)]
        return [everyone, hosts, [list(places) for places in zip(*hosts, strict=True)]]


@dataclass(frozen=True)
class LocalSteps:
    """Each replica steps by itself; every `period` steps their weights agree, by an outer step of
    SGD with this rate and momentum on the mean of their differences. In `fragments`, which take
    turns; the exchange takes up to `delay` steps, in which replicas step on."""

    name: str
    codec: Codec
    period: int
    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    fragments: int = 1
    delay: int = 0
    timeout_s: float = TIMEOUT_S  # after which a replica that does not come is left out

    plain = False

    def peers(self, size: int, index: int = 0) -> ReplicaView:
        """How a codec sees the `size` replicas."""
        return ReplicaView(size, index, sharded=True)


@dataclass(frozen=True)
class AsyncServers:
    """Each replica sends gradients to `servers`, the first replicas, and gets weights back, without
    waiting for others: but for those that are more than `staleness` steps behind (None: for none).
    """

    name: str
    codec: Codec
    servers: int
    staleness: int | None
    timeout_s: float = TIMEOUT_S  # after which a replica that is silent is left out

    plain = False

    def peers(self, size: int, index: int = 0) -> ReplicaView:
        """How a codec sees a server (index 0) and a worker."""
        return ReplicaView(size, index, sharded=False)


Sync = SyncEveryStep | LocalSteps | AsyncServers


def bucket_owners(sizes: list[int], servers: int) -> list[int]:
    """Of tensors of these sizes, in order, the server that owns each: stretches of equal size, as
    far as may be."""
    total, done, found = sum(sizes), 0, []
    for size in sizes:
        found.append(min(servers - 1, servers * (2 * done + size) // (2 * total)) if total else 0)
        done += size
    return found
