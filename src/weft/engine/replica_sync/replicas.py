"""The protocol by which the engine and the training loop keep replicas together.

One protocol with three answers. `ReplicaSync`: replicas are equal after every step, because their
gradients are summed; nothing is left to do. `local_steps.LocalStepReplicas`: replicas step
independently and exchange weights once a period. `async_servers.AsyncServerReplicas`: replicas push
gradients to servers and get weights back. `make_replica_sync` chooses by the plan's Sync.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.core import CodecState, CommTimer, LocalShard
from weft.parallel import Mesh

from .membership import Membership

Share = Callable[[dist.ProcessGroup | None], None]


class ReplicaTraffic(Protocol):
    """What replicas exchange outside the engine's own collectives."""

    sent_bytes: float  # on this rank's wire, since the beginning
    clock: CommTimer


class ReplicaState(Protocol):
    """What replicas hand to each other: the state of an engine."""

    mesh: Mesh
    params: dict[str, nn.Parameter]
    held: dict[str, nn.Parameter]  # what the optimizer has of them
    optimizer: torch.optim.Optimizer
    steps_done: int

    def tensors(self, saved: Collection[str] | None = None) -> Iterator[LocalShard]: ...
    def codec_tensors(self) -> Iterator[tuple[str, Tensor]]: ...
    def scalars(self) -> dict[str, Any]: ...
    def load_scalars(self, scalars: dict[str, Any]) -> None: ...


class ReplicaSync:
    """Replicas that are equal after every step, or a single one.

    Attributes:
        index: this replica's number.
        independent: replicas step by themselves, each in a mesh of its own.
        exchanges_weights: all replicas settle an exchange of weights before one of them saves.
        servers_update: servers take the optimizer's step, and hold the weights.
        caught_up: this replica started late, and has taken over the state of another.
        writes: this replica's ranks write their part of a checkpoint.
    """

    independent = False
    servers_update = False
    exchanges_weights = False
    caught_up = False

    def __init__(self, index: int = 0, writes: bool = True):
        self.index, self.writes = index, writes

    @property
    def leads(self) -> bool:
        """Whether this replica logs and saves for all."""
        return True

    @property
    def members(self) -> tuple[int, ...]:
        """The replicas that take part, where each steps independently."""
        return ()

    @property
    def traffic(self) -> ReplicaTraffic | None:
        return None

    def exchanged(self) -> list[Tensor] | None:
        """The tensors that replicas exchange; None: the gradients' buckets."""
        return None

    @property
    def stalest(self) -> int | None:
        """Steps of the stalest gradient that a server has used; None where none can be stale."""
        return None

    def staleness(self) -> list[int]:
        """Steps by which each gradient since the last call was stale."""
        return []

    def share_initial(self, share: Share) -> None:
        """All replicas begin with the weights of the first one."""

    def attach(self, trained: ReplicaState) -> None:
        """The engine is made: take part in exchanges, or catch up with the other replicas."""

    def connect(self) -> None:
        """Before the first step; afterwards nothing."""

    def push(self, grads: Mapping[str, Tensor], rates: Mapping[str, float]) -> None:
        """Send this step's mean gradients and learning rates to servers, and wait for weights."""
        raise NotImplementedError("only servers take gradients")

    def after_step(self, step: int) -> None:
        """This replica has taken its `step`-th step, counted from 1."""

    def sum_over(self, total: Tensor, step: int) -> None:
        """Sum a tensor over the replicas that take part, in place, where they step
        independently."""

    def gather(self, last: bool) -> bool:
        """Before weights are evaluated or saved. Whether this replica's weights are valid."""
        return True

    def leave(self) -> None:
        """All steps are taken: the others need not wait for this replica."""

    def shards(
        self, step: int | None, saved: Collection[str] | None
    ) -> Iterator[tuple[str, str, Tensor]]:
        """What a checkpoint holds of exchanges: (name, parameter, tensor of this rank)."""
        yield from ()

    def codec_states(self) -> Sequence[CodecState] | None:
        """What codecs keep of each message; None: that of the gradients' buckets."""
        return None

    def restored(self) -> None:
        """The weights are those of a checkpoint."""


class IndependentReplicas(ReplicaSync):
    """Replicas that step by themselves, and decide in a store which of them take part."""

    independent = True

    def __init__(self, index: int, writes: bool, membership: Membership):
        super().__init__(index, writes)
        self.membership = membership

    @property
    def leads(self) -> bool:
        return self.membership.leads

    @property
    def members(self) -> tuple[int, ...]:
        return self.membership.members

    def share_initial(self, share: Share) -> None:
        if self.membership.company.incarnation:
            self.caught_up = True
            return
        meeting = self.membership.run("begin", lambda meeting: share(meeting.group))
        if meeting is not None:
            self.membership.count(meeting)
        self.caught_up = meeting is None

    def leave(self) -> None:
        self.membership.leave()
