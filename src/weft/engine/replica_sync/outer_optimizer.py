"""The outer optimizer of local SGD, BMUF and DiLoCo: replicas step independently, then their
weights are averaged.

Each fragment of the parameters has an anchor, the weights that all replicas last agreed on. Every
`period` steps a replica sends anchor - weights; with D the mean over the replicas, as an outer SGD
step (Reddi et al. 2021):

    V = momentum V + D
    anchor = anchor - lr (D + momentum V if nesterov else V)
    weights = anchor

D arrives `delay` steps later, while the replica steps on: what it has done since is then kept on
top of the new anchor, weights = anchor + (weights - weights when sent). Local SGD: lr 1, no
momentum. BMUF (Chen & Huo 2016): block momentum and block rate. DiLoCo (Douillard et al. 2024),
streaming DiLoCo (2025): Nesterov, fragments in turns.

The mean is over the replicas that take part (`Quorum`): one that died or stalled is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core import COPY, CodecState, CommTimer, LocalSteps, Plan, ReplicaView, bucket_owners
from weft.parallel import request_traffic, wire_bytes

from .bucket_exchange import run_reduction
from .flat_params import FlatParams
from .membership import ExchangeRound, Membership
from .transports import BackendTransport, start_async


@dataclass
class FragmentMessage(FlatParams):
    """Parameters of a fragment that are encoded together."""

    anchor: Tensor
    momentum: Tensor | None
    state: CodecState
    sent: Tensor = field(init=False)  # the weights when the exchange under way began
    mean: Tensor = field(init=False)  # over the replicas, of anchor - sent

    def __post_init__(self) -> None:
        self.sent, self.mean = torch.zeros_like(self.anchor), torch.zeros_like(self.anchor)


@dataclass
class ParamFragment:
    """What this rank has of parameters that agree together: it may be nothing."""

    offset: int  # it sends in steps that leave this remainder by the period
    messages: list[FragmentMessage] = field(default_factory=list)
    exchange: Future[ExchangeRound | None] | None = None  # the one under way
    sent_at: int = 0  # the step after which it began


class OuterOptimizer:
    """One rank's part. `params`: name -> the plain tensor that this rank trains. `plan`: of all
    replicas."""

    def __init__(self, plan: Plan, params: dict[str, Tensor], quorum: Membership):
        sync = plan.sync
        assert isinstance(sync, LocalSteps)
        self._sync, self._quorum, self.clock = sync, quorum, CommTimer()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-exchange")
        self.sent_bytes = 0.0  # on the wire of this rank, since the beginning
        self.left = False  # an exchange was decided without this replica, which has to catch up
        self.ended: list[
            ExchangeRound
        ] = []  # exchanges that have ended, for who lets others in to take from
        self._summed = (0, 0)  # the last step in which numbers were summed, and how often
        turns = range(1, sync.fragments + 1)
        self.fragments = [
            ParamFragment(turn * sync.period // sync.fragments % sync.period) for turn in turns
        ]
        for (number, *_), names in message_params(plan, sync.fragments, params).items():
            tensors = [params[name] for name in names]
            anchor = torch.cat([p.reshape(-1) for p in tensors])
            momentum = torch.zeros_like(anchor) if sync.momentum else None
            state = sync.codec.state([tuple(p.shape) for p in tensors], anchor, names[0])
            self.fragments[number].messages.append(
                FragmentMessage(names, tensors, anchor, momentum, state)
            )

    @property
    def messages(self) -> list[FragmentMessage]:
        """Of all fragments."""
        return [message for fragment in self.fragments for message in fragment.messages]

    def under_way(self, fragment: ParamFragment, step: int) -> bool:
        """Whether an exchange of this fragment has begun by the end of this step, and is still to
        be merged."""
        since = (step - fragment.offset) % self._sync.period
        return step > since and since < self._sync.delay and step - since > 0

    @torch.no_grad()
    def after(self, step: int) -> None:
        """The replica has taken its `step`-th step, counted from 1."""
        for fragment in self.fragments:
            since = (step - fragment.offset) % self._sync.period
            if since == 0:
                self._send(fragment, step)
            if since == self._sync.delay and step > since:
                self._merge(fragment)

    def add(self, total: Tensor, step: int) -> None:
        """Sum over the replicas that take part, in place, after a step. All of them call it as
        often."""
        self.settle()
        self._summed = (step, self._summed[1] + 1 if self._summed[0] == step else 1)
        own = total.clone()

        def work(meeting: ExchangeRound) -> None:
            total.copy_(own)
            if meeting.group is not None:
                start_async(dist.all_reduce(total, group=meeting.group, async_op=True)).wait()

        self._count(self._quorum.run(f"sum/{step}/{self._summed[1]}", work))

    def settle(self) -> None:
        """Wait for what is under way. All replicas that take part do so at the same step."""
        for fragment in sorted(
            self.fragments, key=lambda each: each.sent_at
        ):  # the last one counts
            self._arrive(fragment)

    def wait(self) -> None:
        """Wait for what is under way, which counts later, as in other replicas."""
        for fragment in self.fragments:
            if fragment.exchange is not None:
                with self.clock.waiting():
                    self.left |= fragment.exchange.result() is None

    def agree(self) -> None:
        """All replicas have the same weights now."""
        for message in self.messages:
            message.anchor.copy_(message.flat())

    def forget(self) -> None:
        """What was under way is of no use: this replica takes over all that another one has."""
        self.settle()
        self.left = False
        self.ended.clear()

    def _arrive(self, fragment: ParamFragment) -> None:
        if fragment.exchange is not None:
            with self.clock.waiting():
                meeting = fragment.exchange.result()
            fragment.exchange = None
            self._count(meeting)
            if meeting is not None:
                self.ended.append(meeting)

    def _count(self, meeting: ExchangeRound | None) -> None:
        if meeting is None:
            self.left = True
        else:
            self._quorum.count(meeting)

    def _send(self, fragment: ParamFragment, step: int) -> None:
        kept = []
        for message in fragment.messages:
            message.sent = message.flat()
            kept.append({key: value.clone() for key, value in message.state.items()})

        @torch.no_grad()
        def work(meeting: ExchangeRound) -> None:
            peers = self._sync.replica_view(meeting.size, meeting.index)
            for message, state in zip(fragment.messages, kept, strict=True):
                for key, value in state.items():
                    message.state[key].copy_(value)
                torch.sub(message.anchor, message.sent, out=message.mean)
                if meeting.group is not None:
                    own = replace(peers, bucket=message.names[0])
                    reduction = self._sync.codec.reduce(
                        message.mean, message.state, message.shapes, own
                    )
                    run_reduction(reduction, BackendTransport([meeting.group]), None)
                    message.mean.div_(meeting.size)
                    self.sent_bytes += self._message_bytes(message, peers)

        self.clock.begin()
        name = f"step/{step}/{self.fragments.index(fragment)}"
        fragment.exchange, fragment.sent_at = (
            self._thread.submit(self._quorum.run, name, work),
            step,
        )

    def _message_bytes(self, message: FragmentMessage, peers: ReplicaView) -> float:
        """On the wire of this rank."""
        asked = self._sync.codec.asks(message.shapes, peers, message.anchor.element_size())
        found = [one for each in asked for one in request_traffic("backend", 1, each, peers, 0)]
        return sum(wire_bytes(kind, nbytes, peers.size) for kind, nbytes in found)

    def _merge(self, fragment: ParamFragment) -> None:
        self._arrive(fragment)
        if self.left:
            return
        for message in fragment.messages:
            self._step(message)

    def _step(self, message: FragmentMessage) -> None:
        sync, anchor, step = self._sync, message.anchor, message.mean
        if message.momentum is not None:
            message.momentum.mul_(sync.momentum).add_(step)
            step = (
                step.add(message.momentum, alpha=sync.momentum)
                if sync.nesterov
                else message.momentum
            )
        anchor.sub_(step, alpha=sync.lr)
        if not sync.delay:
            for p, new in zip(message.params, message.views(anchor), strict=True):
                p.copy_(new)
            return
        moved = message.views(anchor - message.sent)
        for p, by in zip(message.params, moved, strict=True):
            p.add_(by)

    def kept(self, step: int | None) -> Iterator[tuple[str, str, Tensor]]:
        """What a checkpoint of this step holds, or may hold: (parameter, what, tensor)."""
        if step is None:
            self.settle()
        else:
            self.wait()
        for fragment, message in ((f, m) for f in self.fragments for m in f.messages):
            flats = [("anchor", message.anchor)]
            if message.momentum is not None:
                flats.append(("momentum", message.momentum))
            if step is None or self.under_way(fragment, step):
                flats += [("arrived", message.mean), ("sent", message.sent)]
            for what, flat in flats:
                for name, view in zip(message.names, message.views(flat), strict=True):
                    yield name, what, view

    def states(self) -> Sequence[CodecState]:
        """What the codec keeps of each message."""
        return [message.state for message in self.messages]


def message_params(plan: Plan, fragments: int, names: Collection[str]) -> dict[tuple, list[str]]:
    """Which of these parameters go in one message: those of a fragment of the whole model that lie
    alike. What other ranks of the replica hold as this one does is not encoded with what is this
    rank's alone."""
    trained, table = [w for w in plan.weights if w.trainable], plan.params()
    places = bucket_owners([prod(w.shape) for w in trained], fragments)
    found: dict[tuple, list[str]] = {}
    for weight, place in zip(trained, places, strict=True):
        if weight.name in names:
            cut = tuple(axis for axis, p in table[weight.name].items() if p.stored != COPY)
            found.setdefault((place, cut, plan.holders(weight.name)), []).append(weight.name)
    return dict(sorted(found.items()))
