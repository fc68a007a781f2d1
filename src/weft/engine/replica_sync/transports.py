"""How a codec's requests are carried between replicas: backend collectives, a ring, or
parameter servers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core import (
    AllGatherRequest,
    AllReduceRequest,
    CommRequest,
    ReduceScatterRequest,
)
from weft.parallel import CHUNK_BYTES, segment_bounds


class BackendTransport:
    """The backend's own collectives, asynchronous. `groups`: one for each round of a codec."""

    def __init__(self, groups: list[dist.ProcessGroup]):
        self._groups = groups

    def start(self, ask: CommRequest, lane: int) -> tuple[dist.Work, Tensor]:
        """Begins what is asked for; the answer is there when the work is done."""
        group = self._groups[min(lane, len(self._groups) - 1)]
        if isinstance(ask, AllReduceRequest):
            return start_async(dist.all_reduce(ask.tensor, group=group, async_op=True)), ask.tensor
        if isinstance(ask, AllGatherRequest):
            every = ask.message.new_empty((group.size(), *ask.message.shape))
            return start_async(
                dist.all_gather_single(every.view(-1), ask.message, group=group, async_op=True)
            ), every
        if ask.sums:
            part = ask.messages.new_empty(ask.messages.shape[1:])
            return start_async(
                dist.reduce_scatter_single(part, ask.messages.view(-1), group=group, async_op=True)
            ), part
        got = torch.empty_like(ask.messages)
        return start_async(
            dist.all_to_all_single(got, ask.messages, group=group, async_op=True)
        ), got

    def answer(self, ask: CommRequest) -> Tensor:
        """What is asked for. Blocks."""
        work, answer = self.start(ask, 0)
        work.wait()
        return answer


def start_async(work: dist.Work | None) -> dist.Work:
    """What was begun asynchronously. A collective that blocks names its group when it fails, and
    finds no name for one that torch.distributed does not count."""
    assert work is not None
    return work


class RingTransport:
    """Point-to-point messages between neighbours. `rings`: this rank's, the one inside a host
    first; `group`: all of them."""

    def __init__(self, group: dist.ProcessGroup, rings: Sequence[dist.ProcessGroup]):
        self._group, self._rings = group, rings

    def answer(self, ask: CommRequest) -> Tensor:
        """What is asked for. Blocks."""
        if isinstance(ask, AllReduceRequest):
            self._sum(ask.tensor.view(-1), self._rings)
            return ask.tensor
        if isinstance(ask, AllGatherRequest):
            return self._gather(ask.message)
        assert isinstance(ask, ReduceScatterRequest)
        return self._scatter(ask.messages)

    def _sum(self, x: Tensor, rings: Sequence[dist.ProcessGroup]) -> None:
        if not rings:
            return
        ring, *outer = rings
        bounds, half = segment_bounds(x.numel(), ring.size()), ring.size() - 1
        if not outer:  # in one go: no chunk waits for the last of the first half
            _around(ring, x, bounds, range(2 * half))
            return
        _around(ring, x, bounds, range(half))
        # this rank now has the sum of the segment after its own
        own = (ring.rank() + 1) % ring.size()
        self._sum(x[bounds[own] : bounds[own + 1]], outer)
        _around(ring, x, bounds, range(half, 2 * half))

    def _gather(self, message: Tensor) -> Tensor:
        every, n = message.unsqueeze(0), message.numel()
        for ring in self._rings:
            rows = every.new_empty((ring.size(), *every.shape))
            # a segment is a row, and the first that this rank sends is the one after its own
            rows[(ring.rank() + 1) % ring.size()] = every
            size = every.shape[0] * n
            turns = range(ring.size() - 1, 2 * (ring.size() - 1))
            _around(ring, rows.view(-1), [i * size for i in range(ring.size() + 1)], turns)
            # row r + 1 is rank r's; hosts are outermost
            every = rows.roll(-1, 0).flatten(0, 1)
        return every

    def _scatter(self, messages: Tensor) -> Tensor:
        """Straight to whom each is for: round the ring a message would pass through others."""
        got, here, size = torch.empty_like(messages), self._group.rank(), self._group.size()
        got[here] = messages[here]
        works = []
        for turn in range(1, size):
            to, come = (here + turn) % size, (here - turn) % size
            works.append(_send(messages[to], to, self._group))
            works.append(_receive(got[come], come, self._group))
        for work in works:
            work.wait()
        return got


def _around(ring: dist.ProcessGroup, x: Tensor, bounds: list[int], turns: range) -> None:
    """Some of the 2 (size - 1) turns of a sum. In each a rank gets a segment from the one before,
    chunk by chunk, and passes it on in the next. In the first half it adds what came to its own, in
    the second it puts it in place."""
    size, rank = ring.size(), ring.rank()
    left, right = (rank - 1) % size, (rank + 1) % size
    per = max(1, CHUNK_BYTES // x.element_size())

    def chunks(segment: int) -> list[Tensor]:
        start, stop = bounds[segment % size], bounds[segment % size + 1]
        return (
            [x[a:b] for a, b in pairwise([*range(start, stop, per), stop])] if stop > start else []
        )

    # All at once: gloo sends what a receive is posted for, and the word that one is posted would,
    # between two ranks, queue up behind what goes the other way.
    wanted = [(turn, part) for turn in turns for part in chunks(rank - turn - 1)]
    # In place, too: a sum comes back only after all ranks, this one among them, have sent their
    # parts of it.
    places = [torch.empty_like(part) if turn < size - 1 else part for turn, part in wanted]
    works = [_receive(place, left, ring) for place in places]
    sends = [_send(chunk, right, ring) for chunk in chunks(rank - turns.start)] if turns else []
    for (turn, part), place, work in zip(wanted, places, works, strict=True):
        work.wait()
        if turn < size - 1:
            part.add_(place)
        if turn + 1 in turns:
            sends.append(_send(part, right, ring))
    for send in sends:
        send.wait()


class OwnerTransport:
    """Messages to the one replica that owns a bucket, and weights back from it."""

    def __init__(self, group: dist.ProcessGroup, owner: int):
        self._group, self._owner = group, owner
        self._here = group.rank() == owner

    def answer(self, ask: CommRequest) -> Tensor | None:
        """What is asked for; None where the owner alone needs it. Blocks."""
        if isinstance(ask, AllReduceRequest):
            return self._sum(ask)
        assert isinstance(ask, AllGatherRequest), "owners get whole messages"
        if not self._here:
            _send(ask.message, self._owner, self._group).wait()
            return None
        rows = ask.message.new_empty((self._group.size(), *ask.message.shape))
        rows[self._owner] = ask.message
        for work in [_receive(rows[peer], peer, self._group) for peer in self._others()]:
            work.wait()
        return rows

    def _sum(self, ask: AllReduceRequest) -> Tensor | None:
        x = ask.tensor
        if not self._here:
            _send(x, self._owner, self._group).wait()
            if ask.final:
                return None
            self.spread(x)
            return x
        parts = [torch.empty_like(x) for _ in self._others()]
        works = [
            _receive(part, peer, self._group)
            for part, peer in zip(parts, self._others(), strict=True)
        ]
        for work, part in zip(works, parts, strict=True):  # in rank order, whatever arrives first
            work.wait()
            x.add_(part)
        if not ask.final:
            self.spread(x)
        return x

    def spread(self, x: Tensor) -> None:
        """The owner's x on all replicas."""
        if self._here:
            for work in [_send(x, peer, self._group) for peer in self._others()]:
                work.wait()
        else:
            _receive(x, self._owner, self._group).wait()

    def _others(self) -> list[int]:
        return [peer for peer in range(self._group.size()) if peer != self._owner]


def _send(x: Tensor, peer: int, group: dist.ProcessGroup) -> dist.Work:
    return start_async(dist.isend(x, group=group, group_dst=peer))


def _receive(x: Tensor, peer: int, group: dist.ProcessGroup) -> dist.Work:
    return start_async(dist.irecv(x, group=group, group_src=peer))
