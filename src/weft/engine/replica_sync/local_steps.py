"""Replicas that step independently and exchange weights once a period; one that was left out
takes over the state of another."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core import CodecState, LocalShard, Plan, WeftError

from ..grad_buckets import local_tensor
from . import state_transfer
from .membership import TRIES, Membership
from .outer_optimizer import OuterOptimizer
from .replicas import IndependentReplicas, ReplicaState


class LocalStepReplicas(IndependentReplicas):
    """Local SGD, BMUF and DiLoCo on one rank. `plan`: of all replicas."""

    exchanges_weights = True

    def __init__(self, index: int, writes: bool, membership: Membership, plan: Plan):
        super().__init__(index, writes, membership)
        self._plan = plan
        self._anchored = False  # a checkpoint had the weights that replicas last had in common

    def attach(self, trained: ReplicaState) -> None:
        self._trained = trained
        mine = {n: local_tensor(p.detach()) for n, p in trained.params.items() if p.requires_grad}
        self.outer = OuterOptimizer(self._plan, mine, self.membership)
        if self.caught_up:
            self._catch_up()

    @property
    def traffic(self) -> OuterOptimizer:
        return self.outer

    def exchanged(self) -> list[Tensor]:
        return [message.anchor for message in self.outer.messages]

    def after_step(self, step: int) -> None:
        self.outer.after(step)
        self._give_to_others()
        if self.outer.left:
            self._catch_up()

    def sum_over(self, total: Tensor, step: int) -> None:
        self.outer.add(total, step)

    def gather(self, last: bool) -> bool:
        self.outer.settle()
        return not self.outer.left

    def shards(
        self, step: int | None, saved: Collection[str] | None
    ) -> Iterator[tuple[str, str, Tensor]]:
        self._anchored = saved is not None and any(name.startswith("outer/") for name in saved)
        for name, what, tensor in self.outer.kept(step if saved is None else None):
            full = f"outer/{name}/{what}"
            if saved is None or full in saved:
                yield full, name, tensor

    def codec_states(self) -> Sequence[CodecState]:
        return self.outer.states()

    def restored(self) -> None:
        if not self._anchored:
            self.outer.agree()

    # ---- replicas that come back -----------------------------------------------------------------

    def _catch_up(self) -> None:
        """Take over all that another replica has."""
        self.outer.forget()
        for _ in range(TRIES):
            group = self.membership.ask()
            facts: dict[str, Any] = {}
            with suppress(RuntimeError):  # the other one has ended meanwhile
                facts = self._taken(group)
            if self._all_ranks(bool(facts)):
                self._trained.load_scalars(facts)
                return
        raise WeftError(
            f"replica {self.index} was left out, and {TRIES} others ended while it caught up from"
            " them"
        )

    def _taken(self, group: dist.ProcessGroup) -> dict[str, Any]:
        """The scalars of the replica that gives; its tensors are this one's now."""
        facts = state_transfer.receive_facts(group)
        shards, kept = self._state(facts["names"])
        if [shard.name for shard in shards] != facts["names"]:
            raise WeftError(
                f"replica {self.index} and the replica that it catches up from have"
                " different tensors"
            )
        state_transfer.receive_tensors(group, [*(shard.tensor for shard in shards), *kept])
        for name, tensor in self._trained.codec_tensors():
            if name.endswith("/residual"):
                tensor.zero_()  # what the other one has not sent is not this one's to send
        return facts["scalars"]

    def _all_ranks(self, well: bool) -> bool:
        """Whether it is so on all ranks of the replica."""
        mesh = self._trained.mesh
        live, found = mesh.layout.active_axes(), torch.tensor(int(well))
        if live:
            dist.all_reduce(found, dist.ReduceOp.MIN, group=mesh.group(*live))
        return bool(found)

    def _give_to_others(self) -> None:
        """Send this replica's state to those that asked for it at exchanges that have ended."""
        while self.outer.ended:
            for group in self.membership.grants(self.outer.ended.pop(0)):
                shards, kept = self._state(None)
                names = [shard.name for shard in shards]
                facts = {"scalars": self._trained.scalars(), "names": names}
                if self.outer.left:  # what it has is of no use, and who asked asks again
                    continue
                tensors = [*(shard.tensor for shard in shards), *kept]
                with suppress(RuntimeError):  # it is gone again
                    state_transfer.send_state(group, facts, tensors)

    def _state(self, names: Collection[str] | None) -> tuple[list[LocalShard], list[Tensor]]:
        """All that a checkpoint holds, and what codecs keep."""
        shards = [s for s in self._trained.tensors(names) if not s.name.startswith("sync/")]
        return shards, [tensor for _, tensor in self._trained.codec_tensors()]
