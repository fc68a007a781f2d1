"""Outer: replicas that step by themselves, and whose weights agree from time to time.

Each fragment of the parameters has an anchor, the weights that all replicas last agreed on. Every `period` steps a
replica sends anchor - weights; with D the mean over the replicas, as an outer SGD step (Reddi et al. 2021):

    V = momentum V + D        anchor = anchor - lr (D + momentum V if nesterov else V)        weights = anchor

D arrives `delay` steps later, while the replica steps on: what it has done since is then kept on top of the new
anchor, weights = anchor + (weights - weights when sent). Local SGD: lr 1, no momentum. BMUF (Chen & Huo 2016): block
momentum and block rate. DiLoCo (Douillard et al. 2024), streaming DiLoCo (2025): Nesterov, fragments in turns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from ..codecs import State, Sum
from ..mesh import Mesh
from ..plans import COPY, Plan
from ..syncs import EachPeriod, owners
from .exchange import Clock, Threaded
from .wires import Backend, carried, on_wire


@dataclass
class Fragment:
    """Parameters that agree together. Flat tensors [n] hold them one after the other."""

    names: tuple[str, ...]
    params: list[Tensor]
    offset: int  # it sends in steps that leave this remainder by the period
    anchor: Tensor
    momentum: Tensor | None
    state: State
    exchange: Future[None] | None = None  # the one under way
    sent: Tensor = field(init=False)  # the weights when the exchange under way began
    mean: Tensor = field(init=False)  # what is exchanged, then its mean

    def __post_init__(self) -> None:
        self.sent, self.mean = torch.zeros_like(self.anchor), torch.zeros_like(self.anchor)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(p.shape) for p in self.params]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters' parts of a flat tensor."""
        parts = flat.split([p.numel() for p in self.params])
        return [part.view(p.shape) for part, p in zip(parts, self.params, strict=True)]

    def weights(self) -> Tensor:
        return torch.cat([p.reshape(-1) for p in self.params])


class Outer:
    """One rank's part. `params`: name -> the plain tensor that this rank trains. `plan`: of all replicas."""

    def __init__(self, plan: Plan, params: dict[str, Tensor], mesh: Mesh, replica: int):
        sync, replicas = plan.sync, plan.layout.size("dp")
        assert isinstance(sync, EachPeriod)
        self._sync, self._peers = sync, sync.peers(replicas, replica)
        self._wire, self._thread, self.clock = Backend(mesh.lanes), Threaded(), Clock()
        self.sent_bytes = 0.0  # on the wire of this rank, since the beginning
        self.fragments: list[Fragment] = []
        for (number, *_), names in _together(plan, sync.fragments, params).items():
            tensors = [params[name] for name in names]
            anchor = torch.cat([p.reshape(-1) for p in tensors])
            momentum = torch.zeros_like(anchor) if sync.momentum else None
            state = sync.codec.state([tuple(p.shape) for p in tensors], anchor)
            offset = (number + 1) * sync.period // sync.fragments % sync.period
            self.fragments.append(Fragment(tuple(names), tensors, offset, anchor, momentum, state))

    def under_way(self, fragment: Fragment, step: int) -> bool:
        """Whether an exchange of this fragment has begun by the end of this step, and is still to be merged."""
        since = (step - fragment.offset) % self._sync.period
        return step > since and since < self._sync.delay and step - since > 0

    @torch.no_grad()
    def after(self, step: int) -> None:
        """The replica has taken its `step`-th step, counted from 1."""
        for fragment in self.fragments:
            since = (step - fragment.offset) % self._sync.period
            if since == 0:
                self._send(fragment)
            if since == self._sync.delay and step > since:
                self._merge(fragment)

    def add(self, total: Tensor) -> None:
        """Sum over the replicas, in place. All of them call it."""
        self.settle()
        self._wire.answer(Sum(total))

    def settle(self) -> None:
        """Wait for what is under way."""
        for fragment in self.fragments:
            self._arrive(fragment)

    def _arrive(self, fragment: Fragment) -> None:
        if fragment.exchange is not None:
            with self.clock.waiting():
                fragment.exchange.result()
            fragment.exchange = None

    def _send(self, fragment: Fragment) -> None:
        fragment.sent = fragment.weights()
        torch.sub(fragment.anchor, fragment.sent, out=fragment.mean)
        reduction = self._sync.codec.reduce(fragment.mean, fragment.state, fragment.shapes, self._peers)
        self.clock.begin()
        fragment.exchange = self._thread.launch(reduction, self._wire, None)
        self.sent_bytes += self._message_bytes(fragment)

    def _message_bytes(self, fragment: Fragment) -> float:
        """Of one exchange, on the wire of this rank."""
        asked = self._sync.codec.asks(fragment.shapes, self._peers, fragment.anchor.element_size())
        found = [one for each in asked for one in carried("backend", 1, each, self._peers, 0)]
        return sum(on_wire(kind, nbytes, self._peers.size) for kind, nbytes in found)

    def _merge(self, fragment: Fragment) -> None:
        self._arrive(fragment)
        sync, anchor, step = self._sync, fragment.anchor, fragment.mean.div_(self._peers.size)
        if fragment.momentum is not None:
            fragment.momentum.mul_(sync.momentum).add_(step)
            step = step.add(fragment.momentum, alpha=sync.momentum) if sync.nesterov else fragment.momentum
        anchor.sub_(step, alpha=sync.lr)
        if not sync.delay:
            for p, new in zip(fragment.params, fragment.views(anchor), strict=True):
                p.copy_(new)
            return
        moved = fragment.views(anchor - fragment.sent)
        for p, by in zip(fragment.params, moved, strict=True):
            p.add_(by)

    def kept(self, step: int | None) -> Iterator[tuple[str, str, Tensor, bool]]:
        """What a checkpoint of this step holds, or may hold: (parameter, what, tensor, whether all replicas have the
        same)."""
        self.settle()
        for fragment in self.fragments:
            flats = [("anchor", fragment.anchor, True)]
            if fragment.momentum is not None:
                flats.append(("momentum", fragment.momentum, True))
            if step is None or self.under_way(fragment, step):
                flats += [("arrived", fragment.mean, True), ("sent", fragment.sent, False)]
            for what, flat, same in flats:
                for name, view in zip(fragment.names, fragment.views(flat), strict=True):
                    yield name, what, view, same

    def states(self) -> Sequence[State]:
        """What the codec keeps of each fragment."""
        return [fragment.state for fragment in self.fragments]


def _together(plan: Plan, fragments: int, names: Collection[str]) -> dict[tuple, list[str]]:
    """Which of these parameters go in one message: those of a fragment of the whole model that lie alike. What other
    ranks of the replica hold as this one does is not encoded with what is this rank's alone."""
    trained, table = [w for w in plan.weights if w.trainable], plan.params()
    places = owners([prod(w.shape) for w in trained], fragments)
    found: dict[tuple, list[str]] = {}
    for weight, place in zip(trained, places, strict=True):
        if weight.name in names:
            cut = tuple(axis for axis, p in table[weight.name].items() if p.stored != COPY)
            found.setdefault((place, cut, plan.holders(weight.name)), []).append(weight.name)
    return dict(sorted(found.items()))
