"""Asynchronous parameter servers on one device: what the servers and workers of a run did, in the
order that the run has noted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from weft.core import REPLICA_AXIS, AsyncServers, ConfigError, Plan, bucket_owners
from weft.engine import Optimizers, UpdateOrder

from .codec_definitions import DefinedCodec, same
from .coded_gradients import untold
from .parcels import samples_of
from .plain.draw_laws import DrawLaws
from .plain.samples import division_faults
from .plain.servers import PlainServer, ServedState, order_faults
from .plain_run import PlainRun

Grads = dict[str, Tensor]


def is_served(plan: Plan) -> bool:
    """Whether asynchronous servers take the steps."""
    return plan.replicas_step_independently and isinstance(plan.sync, AsyncServers)


def check_servers(plan: Plan) -> None:
    """Refuse replicas whose ranks have servers of their own. Raises ConfigError."""
    sync, layout = plan.sync, plan.layout
    assert isinstance(sync, AsyncServers)
    if layout.world > layout.replica_count:
        problem = (
            f"in {layout} each rank of a replica has its own server, which applies updates in"
            " its own order"
        )
        fix = f'verify dp{layout.replica_count}, or with sync.name = "allreduce"'
        raise ConfigError("sync.name", sync.name, problem, fix)


class PlainWorker:
    """One replica: it computes with the weights that servers gave it.

    Args:
        run: its model.
        steps: that it takes.
        gradients: of its n-th step, the first of which is 0, as they are sent.
        ended: called after its n-th step, the first of which is 1, when it has the weights.
        saves: after which steps it saves what servers have, and goes on with that.
        saved: called after these steps, before `ended`.
    """

    def __init__(
        self,
        run: PlainRun,
        steps: int,
        gradients: Callable[[int], Grads],
        ended: Callable[[int], None],
        saves: Callable[[int], bool],
        saved: Callable[[int], None] = lambda n: None,
    ):
        self.run, self._steps, self._gradients = run, steps, gradients
        self._ended, self._saves, self._saved = ended, saves, saved
        self.pushed: list[Grads] = []
        self._taken = self._shown = 0
        self._waits = False  # for what it saves

    def go_on(self, servers: Sequence[PlainServer], number: int) -> bool:
        """Do what it does when servers have done the next for it. Whether they have."""
        if self._waits:
            if not all(len(server.shown) > self._shown for server in servers):
                return False
            self._take([server.shown[self._shown].weights for server in servers])
            self._shown, self._waits = self._shown + 1, False
            self._saved(self._taken - 1)
        else:
            if not all(len(server.given[number]) > self._taken for server in servers):
                return False
            self._take([server.given[number][self._taken] for server in servers])
            self._taken += 1
            self._waits = self._taken > 1 and self._saves(self._taken - 1)
        if not self._waits:
            if self._taken > 1:
                self._ended(self._taken - 1)
            if len(self.pushed) < self._steps:
                self.pushed.append(self._gradients(len(self.pushed)))
        return True

    @torch.no_grad()
    def _take(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        for name, value in (item for part in parts for item in part.items()):
            self.run.params[name].copy_(value)


def begin_servers(
    plan: Plan,
    optimizer: Optimizers,
    begun: ServedState,
    orders: Sequence[UpdateOrder],
    laws: DrawLaws,
    factor: Callable[[int], float] = lambda n: 1.0,
    near: Callable[[Tensor], Tensor] = same,
) -> dict[int, PlainServer]:
    """The servers of a plan, by number, before they have done anything. `begun`: the weights that
    are trained, in the model's order, and what optimizers have kept of them. `orders`: by number;
    `laws`: of what codecs draw; `factor`: as of a PlainServer; `near`: changes what workers encode
    by a few roundings. What codecs keep begins anew."""
    sync, count = plan.sync, plan.layout.replica_count
    assert isinstance(sync, AsyncServers)
    whose = bucket_owners([p.numel() for p in begun.weights.values()], sync.servers)
    found = {}
    for number in sorted(set(whose)):
        owned = {n for n, server in zip(begun.weights, whose, strict=True) if server == number}
        weights = {n: value for n, value in begun.weights.items() if n in owned}
        part = ServedState(weights, {n: kept for n, kept in begun.state.items() if n in owned})
        links = _Links(part.weights, plan, laws, near)
        found[number] = PlainServer(part, optimizer, orders[number], count, links, factor)
    return found


def replay(servers: Sequence[PlainServer], workers: Sequence[PlainWorker]) -> None:
    """Let all of them do what they did, as far as the orders go."""
    moved = True
    while moved:
        moved = False
        for server in servers:
            moved |= server.go_on([worker.pushed for worker in workers])
        for number, worker in enumerate(workers):
            moved |= worker.go_on(servers, number)


def replay_faults(
    plan: Plan, orders: Mapping[int, UpdateOrder], steps: int, shown: int
) -> list[str]:
    """Laws that the orders of servers break, or the division of samples. `steps`, `shown`: as of
    `order_faults`."""
    count, sync = plan.layout.replica_count, plan.sync
    assert isinstance(sync, AsyncServers)
    found = division_faults(samples_of(plan, REPLICA_AXIS), plan.batch)
    for number, order in orders.items():
        faults = order_faults(order, count, steps, sync.staleness, shown)
        found += [f"server {number}: {fault}" for fault in faults]
    return found


class _Links:
    """What arrives at a server of each worker's gradients: through a codec, if there is one."""

    def __init__(
        self,
        part: Mapping[str, Tensor],
        plan: Plan,
        laws: DrawLaws,
        near: Callable[[Tensor], Tensor],
    ):
        sync, workers = plan.sync, plan.layout.replica_count
        assert isinstance(sync, AsyncServers)
        self._plan, self._near = plan, near
        self._shapes = {name: tuple(p.shape) for name, p in part.items()}
        shapes, name = list(self._shapes.values()), next(iter(part))
        coded = range(workers if sync.codec.name != "identity" else 0)
        self.codecs = [
            DefinedCodec(sync.codec, shapes, sync.worker_view(name, worker), laws, of)
            for worker, of in enumerate(f"{name} of worker {n}" for n in coded)
        ]

    def __call__(self, worker: int, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if not self.codecs:
            return gradients
        zeros = {n: torch.zeros(s, dtype=torch.float64) for n, s in self._shapes.items()}
        flat = torch.cat([gradients.get(n, zero).flatten() for n, zero in zeros.items()])
        plain = self.codecs[worker].plain
        total = plain.total([torch.zeros_like(flat), self._near(flat)], None)
        if plain.undecided:
            why = f"worker {worker} encodes {plain.undecided} numbers that are only rounding"
            raise untold(self._plan, why)
        parts = total.split([zero.numel() for zero in zeros.values()])
        return {n: part.view(s) for part, (n, s) in zip(parts, self._shapes.items(), strict=True)}
