"""Replicas under an asynchronous parameter server: those that push gradients and pull weights,
and those that serve."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core import COPY, STAGE_AXIS, AsyncServers, ConfigError, Plan, WeftError, bucket_owners

from ..grad_buckets import local_tensor
from ..optimizers import Optimizers
from .async_parameter_server import AsyncWorker, ParameterServer, UpdateOrder
from .flat_params import FlatParams
from .membership import Membership
from .replicas import IndependentReplicas, ReplicaState


class AsyncServerReplicas(IndependentReplicas):
    """One rank's worker, and its server if its replica is one. `plan`: of all replicas.

    Attributes:
        order: where its server notes the order of updates; None: nowhere. Set before the first
            step.
    """

    servers_update = True
    order: UpdateOrder | None = None

    def __init__(
        self,
        index: int,
        writes: bool,
        membership: Membership,
        plan: Plan,
        sync: AsyncServers,
        optimizers: Optimizers,
    ):
        super().__init__(index, writes, membership)
        self._plan, self._sync, self._optimizers = plan, sync, optimizers
        self.server: ParameterServer | None = None

    def attach(self, trained: ReplicaState) -> None:
        self._trained = trained
        self.caught_up = False  # it gets what it needs when it connects
        mine = {n: local_tensor(p.detach()) for n, p in trained.params.items() if p.requires_grad}
        every = [w for w in self._plan.weights if w.trainable]
        owners = bucket_owners([prod(w.shape) for w in every], self._sync.servers)
        parts = []
        for server in range(self._sync.servers):
            owned = [w.name for w, owner in zip(every, owners, strict=True) if owner == server]
            names = [name for name in owned if name in mine]
            parts.append(FlatParams(names, [mine[name] for name in names]))
        self.worker = AsyncWorker(self._sync, self.membership, parts)
        serves = self.index < self._sync.servers and parts[self.index].params
        self._served = parts[self.index] if serves else None
        self._copied = self._copies_by_axis(mine)

    def _copies_by_axis(self, mine: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        """This rank's weights by each axis of a replica along which others have copies. Raises
        ConfigError for those that two stages hold."""
        for name in mine:
            if len(self._plan.holders(name)) > 1:
                problem = (
                    f"several stages hold {name}, and their servers would apply its"
                    " updates in different orders"
                )
                fix = 'use staleness = 0, name = "allreduce", or a cut that keeps its uses together'
                raise ConfigError("sync.name", self._sync.name, problem, fix)
        placed, found = self._plan.params(), dict[str, list[Tensor]]()
        for axis in self._trained.mesh.layout.active_axes():
            for name, weight in mine.items() if axis != STAGE_AXIS else ():
                there = placed[name].get(axis)
                if there is None or there.stored == COPY:
                    found.setdefault(axis, []).append(weight)
        return found

    @torch.no_grad()
    def _take_first_copies(self) -> None:
        """Make copies of a weight equal again. The server of each rank applies gradients in an
        order of its own, so the copies that a replica gets part."""
        for axis, weights in self._copied.items():
            for weight in weights:
                whole = weight.contiguous()
                dist.broadcast(whole, group=self._trained.mesh.group(axis), group_src=0)
                weight.copy_(whole)

    @property
    def members(self) -> tuple[int, ...]:
        return self.membership.members if self.server is None else self.server.workers

    @property
    def traffic(self) -> AsyncWorker:
        return self.worker

    def exchanged(self) -> list[Tensor]:
        params = self._trained.params.values()
        return [local_tensor(p.detach()) for p in params if p.requires_grad]

    @property
    def stalest(self) -> int:
        return self.worker.stalest

    def staleness(self) -> list[int]:
        found = [*self.worker.behind]
        self.worker.behind.clear()
        return found

    def connect(self) -> None:
        """Begin to serve, and get weights and the number of steps that count as taken. Weights and
        optimizer state must be those that training goes on from."""
        if self.worker.connected:
            return
        trained = self._trained
        if self._served is not None:
            state = {
                name: {
                    key: v.clone() if torch.is_tensor(v) else v
                    for key, v in self._state_of(name).items()
                }
                for name in self._served.names
                if self._state_of(name)
            }
            self.server = ParameterServer(
                self._sync,
                self.membership,
                self._served,
                self._optimizers,
                state,
                trained.steps_done,
                self.order,
            )
        trained.optimizer.state.clear()  # it is the servers' from now on
        live = trained.mesh.layout.active_axes()
        steps = torch.tensor(self.worker.connect(trained.steps_done))
        if live:  # servers of its ranks may have counted differently
            dist.all_reduce(steps, dist.ReduceOp.MAX, group=trained.mesh.group(*live))
        trained.steps_done = int(steps)
        self._take_first_copies()

    def _state_of(self, name: str) -> dict[str, Any]:
        return self._trained.optimizer.state.get(self._trained.held[name], {})

    def push(self, grads: Mapping[str, Tensor], rates: Mapping[str, float]) -> None:
        try:
            self.worker.step(dict(grads), dict(rates))
        finally:
            if self.server is not None and self.server.broken:
                raise WeftError(
                    f"the parameter server of replica {self.index} failed:\n{self.server.broken}"
                )
        self._take_first_copies()

    def gather(self, last: bool) -> bool:
        """The leading replica gets all weights and optimizer state. With `last`, servers end."""
        if not self.worker.connected:
            return True
        if last:
            self.worker.done()
        if last and self.server is not None:
            self.server.idle()
        if self.leads:
            for name, state in self.worker.collect(last).items():
                self._trained.optimizer.state[self._trained.held[name]] = dict(state)
        if last:
            self.worker.close()
            if self.server is not None:
                self.server.close()
        return True
