"""Sync: how the replicas on `dp` are synchronised, as data. Three kinds, by when they do it."""

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

    `route` says how: by the backend's collectives; by a ring of messages, first among `local`
    neighbours if that is more than one; or by the `owners`, the first `servers` replicas, which
    update the parameters that they own and send them back.
    """

    name: str
    codec: Codec
    route: Route = "backend"
    servers: int = 0
    local: int = 1
    bucket_bytes: int = BUCKET_BYTES

    independent = False  # replicas are equal after every step
    asynchronous = False  # replicas wait for one another in every step
    period = 1  # steps from one synchronisation to the next
    delay = 0  # steps that one may take

    @property
    def runs_on_cuda(self) -> bool:
        return self.route == "backend"

    @property
    def updates_on_servers(self) -> bool:
        """Whether some replicas update parameters for all."""
        return self.route == "owners"

    @property
    def plain(self) -> bool:
        """Whether this is the backend's all-reduce without a codec."""
        return self.route == "backend" and self.codec.name == "identity"

    def replica_view(self, size: int, index: int = 0) -> ReplicaView:
        """How a codec sees the `size` replicas. Owners sum for all by themselves."""
        return ReplicaView(size, index, sharded=self.route != "owners")

    def groups(self, size: int) -> list[list[list[int]]]:
        """The process groups that the route needs; each entry divides the `size` replicas into
        groups. Backend: one group of all for each round of a codec. Ring: all replicas, those of
        each host, and those with the same position on all hosts."""
        everyone = [list(range(size))]
        if self.route == "backend":
            return [everyone] * ROUNDS
        if self.route == "owners" or self.local == 1:
            return [everyone]
        hosts = [everyone[0][first : first + self.local] for first in range(0, size, self.local)]
        return [everyone, hosts, [list(places) for places in zip(*hosts, strict=True)]]


@dataclass(frozen=True)
class LocalSteps:
    """Replicas step on their own. Every `period` steps an outer SGD step, with this learning rate
    and momentum, is taken on the mean of their weight differences. The `fragments` of the model
    take turns. An exchange may take up to `delay` steps, during which replicas continue."""

    name: str
    codec: Codec
    period: int
    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    fragments: int = 1
    delay: int = 0
    timeout_s: float = TIMEOUT_S  # a replica that is later than this is left out

    plain = False
    independent = True  # each replica steps by itself
    asynchronous = False  # replicas wait for one another at the end of a period
    runs_on_cuda = False
    servers = 0  # every replica updates all parameters
    updates_on_servers = False
    bucket_bytes = BUCKET_BYTES

    def replica_view(self, size: int, index: int = 0) -> ReplicaView:
        """How a codec sees the `size` replicas."""
        return ReplicaView(size, index, sharded=True)

    def groups(self, size: int) -> list[list[list[int]]]:
        """None: replicas meet in process groups that `Membership` makes."""
        return []


@dataclass(frozen=True)
class AsyncServers:
    """Each replica sends gradients to the servers, which are the first `servers` replicas, and gets
    weights back. It waits only for replicas that are more than `staleness` steps behind (None: for
    none)."""

    name: str
    codec: Codec
    servers: int
    staleness: int | None
    timeout_s: float = TIMEOUT_S  # a replica that is silent for longer is left out

    plain = False
    independent = True  # each replica steps by itself
    asynchronous = True  # replicas push and pull at any time
    runs_on_cuda = False
    period = 1  # steps from one push to the next
    delay = 0
    updates_on_servers = True
    bucket_bytes = BUCKET_BYTES

    def replica_view(self, size: int, index: int = 0) -> ReplicaView:
        """How a codec sees a server (index 0) and a worker."""
        return ReplicaView(size, index, sharded=False)

    def worker_view(self, part: str, worker: int) -> ReplicaView:
        """How the codec of one of all workers sees its server and itself. `part`: names what the
        server has."""
        return ReplicaView(2, 1, sharded=False, bucket=f"{part} of worker {worker}")

    def groups(self, size: int) -> list[list[list[int]]]:
        """None: replicas meet in process groups that `Membership` makes."""
        return []


Sync = SyncEveryStep | LocalSteps | AsyncServers


def bucket_owners(sizes: list[int], servers: int) -> list[int]:
    """The server that owns each of these tensors, in order: each server owns a contiguous stretch,
    of about equal total size."""
    total, done, found = sum(sizes), 0, []
    for size in sizes:
        found.append(min(servers - 1, servers * (2 * done + size) // (2 * total)) if total else 0)
        done += size
    return found
