"""Asynchronous parameter servers: each gradient updates them as it arrives, and workers do not
wait for each other.

Each of the first replicas has a server of its part of the parameters, with their optimizer: threads
beside training. A worker, one in each replica, sends the gradient of its samples and gets weights
back. The server takes a step for each gradient, at 1 / workers of the learning rate. Bounded
staleness (stale synchronous parallel, Ho et al. 2013): who has taken c steps gets weights for the
next one when the slowest worker has taken c - staleness, so weights are never further behind those
of the fastest. With a bound of 0 and plain SGD it is all-reduce.

A worker that ends, or is silent for `timeout_s`, is no longer waited for. One that comes anew
begins with the weights and at the step of the slowest.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.core import AsyncServers, CommTimer, WeftError
from weft.parallel import request_traffic, wire_bytes

from . import state_transfer
from .bucket_exchange import run_reduction
from .flat_params import FlatParams
from .membership import START_S, Membership, private_group
from .optimizer_numbers import NumbersIn
from .transports import OwnerTransport, start_async

POLL_S = 0.2
EVER = timedelta(
    days=30
)  # silence of a worker is timed by its server, and not by what connects them
PUSH, DONE, STATE, FINAL, BYE = range(5)  # what a worker asks for

# what a server did ("applied" a gradient, "gave" weights, "showed" weights and optimizer state to
# who saves them), and for which worker
UpdateOrder = list[tuple[str, int]]
Optimizers = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


class ParameterServer:
    """Serves one part to the workers of all replicas, this one's among them."""

    def __init__(
        self,
        sync: AsyncServers,
        quorum: Membership,
        part: FlatParams,
        optimizer: Optimizers,
        state: dict[str, dict],
        clock: int,
        order: UpdateOrder | None = None,
    ):
        """`state`: of the optimizer, by parameter; `clock`: the steps that workers have taken;
        `order`: where what happens is noted, in its order."""
        self._order = order
        self._sync, self._quorum, self._part = sync, quorum, part
        self._flat = part.flat()
        views = part.views(self._flat)
        self._params = [nn.Parameter(view, requires_grad=True) for view in views]
        for p, view in zip(self._params, views, strict=True):
            p.data = view  # the optimizer changes the flat tensor
        self._numbers = NumbersIn(torch.promote_types(torch.float32, self._flat.dtype))
        with self._numbers:
            self._optimizer = optimizer(list(zip(part.names, self._params, strict=True)))
        for name, p in zip(part.names, self._params, strict=True):
            if name in state:
                self._optimizer.state[p] = state[name]
        self._changed = threading.Condition()
        self._clocks = dict.fromkeys(quorum.members, clock)  # worker -> steps taken
        self._done: set[int] = set()  # workers that have taken all
        self._given = dict.fromkeys(
            quorum.members, clock
        )  # worker -> steps taken when it last got weights
        self._until = dict.fromkeys(
            quorum.members, time.monotonic() + START_S
        )  # when silence becomes too long
        self._served: dict[int, str] = {}  # worker -> the ticket of its connection
        self._awaited = set(
            quorum.members
        )  # who has not connected yet: all begin with the same weights
        # the connections that wait for weights -> the steps that count as taken, and weights, when
        # they may have them
        self._ready: dict[tuple[int, str], tuple[int, Tensor] | None] = {}
        self.broken = (  # a thread's error, as text: the error would keep its connection open
            ""
        )
        self._last = clock  # of those that are gone
        self._store = quorum.meeting_store()
        self._closing = False
        threading.Thread(target=self._accept, name="weft-server", daemon=True).start()

    # ---- connections -----------------------------------------------------------------------------

    def _accept(self) -> None:
        seen: dict[int, str] = {}
        while not self._closing:
            for worker in range(self._quorum.replicas):
                key = f"calls/{self._quorum.replica}/{worker}"
                ticket = self._store.get(key).decode() if self._store.check([key]) else ""
                if ticket and seen.get(worker) != ticket:
                    seen[worker] = ticket
                    threading.Thread(
                        target=self._serve, args=(worker, ticket), name="weft-serve", daemon=True
                    ).start()
            time.sleep(POLL_S / 10)

    def _serve(self, worker: int, ticket: str) -> None:
        """One connection, until it ends."""
        try:
            self._served_by(worker, ticket)
        except _ConnectionClosed:
            pass
        except Exception:  # this replica's own worker ends with it
            self.broken = traceback.format_exc()
        finally:
            self._drop(worker, ticket)
            with self._changed:
                if self._served.get(worker) == ticket:
                    del self._served[worker]

    def _served_by(self, worker: int, ticket: str) -> None:
        sync, quorum = self._sync, self._quorum
        name = f"server/{quorum.replica}/{worker}/{ticket}/{quorum.place}"
        with _messages():
            group = private_group(self._store, name, 0, 2, EVER)
        quorum.take_in(worker, int(ticket))
        view, wire = sync.worker_view(self._part.names[0], worker), OwnerTransport(group, 0)
        codec = sync.codec.state(self._part.shapes, self._flat, view.bucket)
        with self._changed:
            self._served[worker], self._until[worker] = ticket, float("inf")
            self._awaited.discard(worker)
            if worker not in self._clocks:
                self._clocks[worker] = min(self._clocks.values(), default=self._last)
            self._release((worker, ticket))
        self._reply(worker, ticket, group, 0)
        while True:
            ask = torch.zeros(1 + 2 * len(self._params), dtype=torch.float64)
            with _messages():
                start_async(dist.irecv(ask, group=group, group_src=1)).wait()
            kind = int(ask[0])
            if kind == PUSH:
                grad = torch.zeros_like(self._flat)
                peers = sync.replica_view(2, 0)  # the server itself has nothing to add
                with torch.no_grad(), _messages():
                    run_reduction(
                        sync.codec.reduce(grad, codec, self._part.shapes, peers), wire, None
                    )
                behind = self._step(worker, ticket, grad, ask[1:].tolist())
                del grad  # as large as the part, and this worker computes now
                self._reply(worker, ticket, group, behind)
            elif kind == DONE:
                with self._changed:
                    self._done.add(worker)
                self._drop(worker, ticket)
            elif kind in (STATE, FINAL):
                if kind == FINAL:
                    self.idle()
                self._give(worker, group)
            else:
                return

    def _drop(self, worker: int, ticket: str) -> None:
        with self._changed:
            if self._served.get(worker) == ticket:
                self._forget(worker)

    def _drop_silent(self) -> None:
        for worker in list(self._clocks):
            silent = time.monotonic() > self._until[worker]
            if silent:
                self._quorum.leave_out(worker)
            if silent or (worker not in self._served and self._quorum.has_ended(worker)):
                self._forget(worker)

    def _forget(self, worker: int) -> None:
        self._last = max(self._last, self._clocks.pop(worker, 0))
        self._awaited.discard(worker)
        self._release()

    @property
    def workers(self) -> tuple[int, ...]:
        """The replicas that take steps, or have taken all."""
        with self._changed:
            return tuple(sorted({*self._clocks, *self._done}))

    # ---- steps -----------------------------------------------------------------------------------

    def _step(self, worker: int, ticket: str, grad: Tensor, told: Sequence[float]) -> int:
        """Take a step with a worker's gradient; returns how many steps behind the fastest its
        weights were."""
        rates = dict(zip(self._params, told, strict=False))
        with self._changed:
            if worker not in self._clocks or self._served.get(worker) != ticket:
                raise _ConnectionClosed  # nobody waits for it any more, or it has begun anew
            self._until[worker] = float("inf")
            for group in self._optimizer.param_groups:
                group["lr"] = rates[group["params"][0]] / self._quorum.replicas
            views = self._part.views(grad)
            for p, view, reached in zip(
                self._params, views, told[len(self._params) :], strict=True
            ):
                p.grad = view if reached else None
            with self._numbers:
                self._optimizer.step()
            self._optimizer.zero_grad()
            if self._order is not None:
                self._order.append(("applied", worker))
            behind = max(self._given.get(w, 0) for w in self._clocks) - self._given[worker]
            self._clocks[worker] += 1
            self._release((worker, ticket))
        return behind

    def _reply(self, worker: int, ticket: str, group: dist.ProcessGroup, behind: int) -> None:
        """Weights, when this worker may have them."""
        with self._changed:
            while self._ready[worker, ticket] is None and self._served.get(worker) == ticket:
                self._changed.wait(POLL_S)
                self._drop_silent()
            ready = self._ready.pop((worker, ticket))
            if ready is None:
                raise _ConnectionClosed
            clock, flat = ready
            self._until[worker] = time.monotonic() + self._sync.timeout_s
        head = torch.tensor([clock, behind], dtype=torch.float64)
        with _messages():
            start_async(dist.isend(head, group=group, group_dst=1)).wait()
            start_async(dist.isend(flat, group=group, group_dst=1)).wait()

    def _release(self, comes: tuple[int, str] | None = None) -> None:
        """`comes` waits for weights, or another one is not waited for any more. All that may have
        weights get those of now: with no staleness, of the same step."""
        if comes is not None:
            self._ready[comes] = None
        flat = None
        for key in [
            key for key, ready in self._ready.items() if ready is None and self._may_go_on(key[0])
        ]:
            flat = self._flat.clone() if flat is None else flat
            self._given[key[0]] = self._clocks.get(key[0], self._last)
            self._ready[key] = self._given[key[0]], flat
            if self._order is not None:
                self._order.append(("gave", key[0]))
        self._changed.notify_all()

    def _may_go_on(self, worker: int) -> bool:
        if self._awaited:
            return False
        if self._sync.staleness is None or worker not in self._clocks:
            return True
        return self._clocks[worker] - min(self._clocks.values()) <= self._sync.staleness

    # ---- checkpoints and the end -----------------------------------------------------------------

    def _give(self, worker: int, group: dist.ProcessGroup) -> None:
        with self._changed:
            if self._order is not None:
                self._order.append(("showed", worker))
            states = {
                name: {
                    key: value
                    for key, value in sorted(self._optimizer.state[p].items())
                    if torch.is_tensor(value)
                }
                for name, p in zip(self._part.names, self._params, strict=True)
                if self._optimizer.state.get(p)
            }
            facts = {
                name: {
                    key: [str(v.dtype).removeprefix("torch."), list(v.shape)]
                    for key, v in state.items()
                }
                for name, state in states.items()
            }
            tensors = [
                self._flat.clone(),
                *(v.clone() for state in states.values() for v in state.values()),
            ]
        with _messages():
            state_transfer.send_state(group, facts, tensors)

    def idle(self) -> None:
        """Wait until all workers have taken their steps, or are gone."""
        with self._changed:
            while self._clocks:
                self._drop_silent()
                self._changed.wait(POLL_S)

    def close(self) -> None:
        """Wait until the first replica has all that it needs of this server."""
        self.idle()
        while self._quorum.members[0] in self._served:
            time.sleep(POLL_S / 10)
        self._closing = True


class _ConnectionClosed(Exception):
    """A connection is of no more use."""


@contextmanager
def _messages() -> Iterator[None]:
    """Around messages to a worker: it may be gone."""
    try:
        yield
    except RuntimeError as error:
        raise _ConnectionClosed from error


@dataclass
class _ServerLink:
    """From this rank to one server."""

    part: FlatParams
    group: dist.ProcessGroup
    codec: dict[str, Tensor]
    got: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.got = torch.zeros_like(self.part.flat())


class AsyncWorker:
    """This rank's part of one replica that trains. `parts`: of each server; this rank may hold
    nothing of one."""

    def __init__(self, sync: AsyncServers, quorum: Membership, parts: Sequence[FlatParams]):
        self._sync, self._quorum, self.clock = sync, quorum, CommTimer()
        self._parts, self._links = parts, dict[int, _ServerLink]()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-worker")
        self.sent_bytes = 0.0  # on the wire of this rank, since the beginning
        self.behind: list[
            int
        ] = []  # of the steps since somebody looked: how far weights were behind the fastest's
        self.stalest = 0

    @property
    def connected(self) -> bool:
        return bool(self._links)

    def connect(self, steps: int) -> int:
        """Get weights from all servers. Returns the steps that count as taken (`steps`, if this
        rank needs none)."""
        store, quorum, ticket = (
            self._quorum.meeting_store(),
            self._quorum,
            str(self._quorum.company.incarnation),
        )
        for server, part in enumerate(self._parts):
            if quorum.place == 0:
                store.set(f"calls/{server}/{quorum.replica}", ticket)
            if not part.params:
                continue
            if quorum.has_ended(server):
                raise WeftError(
                    f"replica {quorum.replica}: the parameter server of replica {server} has ended"
                )
            name = f"server/{server}/{quorum.replica}/{ticket}/{quorum.place}"
            # a server may keep this worker waiting as long as it waits for others
            group = private_group(
                store, name, 1, 2, timedelta(seconds=2 * self._sync.timeout_s + START_S)
            )
            bucket = self._sync.worker_view(part.names[0], quorum.replica).bucket
            codec = self._sync.codec.state(part.shapes, part.flat(), bucket)
            self._links[server] = _ServerLink(part, group, codec)
        with self._watched():
            clocks = [self._receive(link)[0] for link in self._links.values()]
        return max(clocks, default=steps)

    def step(self, grads: dict[str, Tensor], rates: dict[str, float]) -> None:
        """Push gradients and pull weights; `rates`: the learning rate of each parameter. Raises
        WeftError: a server is gone, or has given up waiting."""
        self.clock.begin()
        with self.clock.waiting(), self._watched():
            # a thread of its own: what watches this one's collectives does not count these
            self._thread.submit(self._exchange, grads, rates).result()

    @torch.no_grad()
    def _exchange(self, grads: dict[str, Tensor], rates: dict[str, float]) -> None:
        for link in self._links.values():
            peers = self._sync.worker_view(link.part.names[0], self._quorum.replica)
            reached = [float(name in grads) for name in link.part.names]
            parts = [
                grads[name].reshape(-1) if name in grads else torch.zeros_like(p).reshape(-1)
                for name, p in zip(link.part.names, link.part.params, strict=True)
            ]
            self._ask(link, PUSH, [*(rates[name] for name in link.part.names), *reached])
            flat = torch.cat(parts)
            run_reduction(
                self._sync.codec.reduce(flat, link.codec, link.part.shapes, peers),
                OwnerTransport(link.group, 0),
                None,
            )
            asked = self._sync.codec.asks(link.part.shapes, peers, flat.element_size())
            found = [one for each in asked for one in request_traffic("owners", 1, each, peers, 0)]
            self.sent_bytes += sum(wire_bytes(kind, nbytes, 2) for kind, nbytes in found)
        behind = max((self._receive(link)[1] for link in self._links.values()), default=0)
        self.behind.append(behind)
        self.stalest = max(self.stalest, behind)

    def _ask(self, link: _ServerLink, kind: int, rest: Sequence[float] = ()) -> None:
        message = torch.zeros(1 + 2 * len(link.part.params), dtype=torch.float64)
        message[0] = kind
        if rest:
            message[1:] = torch.tensor(rest, dtype=torch.float64)
        start_async(dist.isend(message, group=link.group, group_dst=0)).wait()

    @torch.no_grad()
    def _receive(self, link: _ServerLink) -> tuple[int, int]:
        head = torch.zeros(2, dtype=torch.float64)
        start_async(dist.irecv(head, group=link.group, group_src=0)).wait()
        start_async(dist.irecv(link.got, group=link.group, group_src=0)).wait()
        for p, new in zip(link.part.params, link.part.views(link.got), strict=True):
            p.copy_(new)
        return int(head[0]), int(head[1])

    def done(self) -> None:
        """This worker takes no more steps."""
        with self._watched():
            for link in self._links.values():
                self._ask(link, DONE)

    def collect(self, last: bool = False) -> dict[str, dict[str, Tensor]]:
        """The servers' weights, and their optimizers' state by parameter; of the end of all steps,
        if `last`."""
        states: dict[str, dict[str, Tensor]] = {}
        with self._watched():
            for link in self._links.values():
                self._ask(link, FINAL if last else STATE)
                facts = state_transfer.receive_facts(link.group)
                made = {
                    name: {
                        key: torch.empty(shape, dtype=getattr(torch, dtype))
                        for key, (dtype, shape) in of.items()
                    }
                    for name, of in facts.items()
                }
                state_transfer.receive_tensors(
                    link.group, [link.got, *(v for of in made.values() for v in of.values())]
                )
                states |= made
                with torch.no_grad():
                    for p, new in zip(link.part.params, link.part.views(link.got), strict=True):
                        p.copy_(new)
        return states

    def close(self) -> None:
        """This worker has nothing more to send."""
        for link in self._links.values():
            with suppress(RuntimeError):
                self._ask(link, BYE)
        self._links = {}

    def _watched(self) -> Any:
        return _ServerErrors(self._quorum.replica)


class _ServerErrors:
    """Around messages to servers: their errors in words."""

    def __init__(self, replica: int):
        self._replica = replica

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            problem = "a parameter server is gone, or no longer waits for this worker"
            raise WeftError(f"replica {self._replica}: {problem}") from error
