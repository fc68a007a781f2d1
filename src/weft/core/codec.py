"""Codec: how a gradient, or a difference of weights, is compressed for the wire.

A codec never communicates. It says as data what the ranks are to exchange (`Sum`, `Gather`,
`Scatter`) and gets the answer back, so any transport serves any codec:

    def reduce(self, x, state, shapes, peers):
        message = encode(x)
        messages = yield Gather(message)          # one row for each rank
        x.copy_(sum of what they decode to)

Error feedback (Seide et al. 2014; Karimireddy et al. 2019): what a message leaves out is kept in
the state and added to the next one, so that all that was sent plus all that is kept is the sum of
all that came.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class AllReduceRequest:
    """Answered by the same tensor, summed over all ranks. `final`: it is the result, so who needs
    none may get none."""

    tensor: Tensor
    final: bool = True


@dataclass(frozen=True)
class AllGatherRequest:
    """One message of each rank: answered by all of them, [ranks, n], in rank order."""

    message: Tensor


@dataclass(frozen=True)
class ReduceScatterRequest:
    """Messages [ranks, n], row i for rank i: answered by the rows for this rank, [ranks, n], in
    rank order.

    `sums`: answered by their sum instead, [n].
    """

    messages: Tensor
    sums: bool = False


CommRequest = AllReduceRequest | AllGatherRequest | ReduceScatterRequest
Reduction = Generator[CommRequest, Tensor, None]
CodecState = dict[str, Tensor]


class RequestSize(NamedTuple):
    """One thing that is asked for, and what a rank gives to it: of one message, where it has one
    for each rank."""

    kind: Literal["sum", "gather", "scatter", "sum_scatter"]
    elements: int
    itemsize: int
    final: bool = True  # as of Sum

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize


@dataclass(frozen=True)
class ReplicaView:
    """The ranks that agree: how many, and which one this is. `sharded`: each may sum a part of a
    tensor for all. `bucket`: names what is reduced; what is drawn at random for it is its own."""

    size: int
    index: int = 0
    sharded: bool = False
    scale: Tensor | float | None = (
        None  # times this, what is reduced is a part of the mean gradient; None: not known
    )
    bucket: str = ""


class Codec(ABC):
    """A codec with its options; frozen. What it keeps between calls is the `state` of each bucket,
    saved with it."""

    name: ClassVar[str]

    @property
    def has_momentum(self) -> bool:
        """Whether what it sends are sums of momenta, for an optimizer without one."""
        return False

    @property
    def keeps_residual(self) -> bool:
        """Whether it keeps what a message leaves out, and adds it to the next one."""
        return False

    def state(self, shapes: Shapes, like: Tensor, bucket: str = "") -> CodecState:
        """What is kept for a bucket of tensors of these shapes, which lie one after the other in
        `like` [n]. `bucket`: its name, as of a ReplicaView."""
        return {}

    @abstractmethod
    def reduce(self, x: Tensor, state: CodecState, shapes: Shapes, peers: ReplicaView) -> Reduction:
        """Leaves in x [n] the sum over all ranks, as far as the codec can say it; equal bits on all
        of them."""

    def scatter(self, x: Tensor, out: Tensor, state: CodecState, peers: ReplicaView) -> Reduction:
        """Leaves in out [n] the sum of what all ranks have for this one; x is [ranks * n]. Only
        where `scatters`."""
        raise NotImplementedError(self.name)

    @abstractmethod
    def asks(
        self, shapes: Shapes, peers: ReplicaView, itemsize: int, step: int = 0
    ) -> list[RequestSize]:
        """What the `step`-th `reduce` asks for. `itemsize`: of what is reduced."""

    def scatter_asks(self, n: int, peers: ReplicaView, itemsize: int) -> list[RequestSize]:
        """What `scatter` asks for, to leave n elements on each rank. Only where `scatters`."""
        raise NotImplementedError(self.name)

    @property
    def scatters(self) -> bool:
        """Whether `scatter` works."""
        return type(self).scatter is not Codec.scatter


@dataclass(frozen=True)
class MessageCodec(Codec):
    """A codec whose messages are bytes that only decoding can add up.

    Two ranks give each other all (as do those of a sparse codec); more of them sum a part each, and
    give one another the sums, encoded again: as many bytes as an all-reduce has. With `feedback`
    both errors are kept.
    """

    feedback: bool = True
    block: ClassVar[int] = 1  # elements that are encoded together
    sparse: ClassVar[bool] = False

    @abstractmethod
    def encode(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """[..., n] -> uint8 [..., nbytes]; n is a multiple of `block` in all rows, or there is one
        row. `generator`: where random draws come from."""

    @abstractmethod
    def decode(self, message: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """uint8 [..., nbytes] -> [..., n]"""

    @abstractmethod
    def nbytes(self, n: int) -> int:
        """Of the message of n elements."""

    @property
    def draws(self) -> bool:
        """Whether `encode` draws at random."""
        return False

    @property
    def keeps_residual(self) -> bool:
        return self.feedback

    def state(self, shapes: Shapes, like: Tensor, bucket: str = "") -> CodecState:
        kept = {"residual": torch.zeros_like(like)} if self.feedback else {}
        return kept | ({"calls": torch.zeros((), dtype=torch.int64)} if self.draws else {})

    def generator(
        self, state: CodecState, peers: ReplicaView, device: torch.device
    ) -> torch.Generator | None:
        """Where the draws of a call come from: others on every replica, for every bucket and in
        every call, and the same on ranks that hold the same of one replica."""
        if not self.draws:
            return None
        state["calls"] += 1
        key = f"{int(state['calls'])} {peers.size} {peers.index} {peers.bucket}"
        return generator_of(key, device)

    def reduce(self, x: Tensor, state: CodecState, shapes: Shapes, peers: ReplicaView) -> Reduction:
        generator = self.generator(state, peers, x.device)
        if self.feedback:
            x.add_(state["residual"])
        if peers.sharded and peers.size > 2 and not self.sparse:
            yield from self._in_parts(x, state, peers, generator)
            return
        message = self.encode(x, generator)
        own = self.decode(message, x.numel(), x.dtype)
        if self.feedback:
            torch.sub(x, own, out=state["residual"])
        messages = yield AllGatherRequest(message)
        self._add(messages, x, own, peers)

    def _add(self, messages: Tensor, out: Tensor, own: Tensor, peers: ReplicaView) -> None:
        """The sum of the messages, in rank order: floating-point sums are to be the same
        everywhere."""
        for rank in range(peers.size):
            part = (
                own if rank == peers.index else self.decode(messages[rank], out.numel(), out.dtype)
            )
            out.copy_(part) if rank == 0 else out.add_(part)

    def _in_parts(
        self, x: Tensor, state: CodecState, peers: ReplicaView, generator: torch.Generator | None
    ) -> Reduction:
        n, part = x.numel(), self._part(x.numel(), peers)
        rows = torch.zeros(peers.size, part, dtype=x.dtype, device=x.device)
        rows.view(-1)[:n] = x
        out = torch.empty_like(rows[0])
        error = yield from self._scatter(rows, out, peers, generator)
        message = self.encode(out, generator)
        if self.feedback:
            error[peers.index] += out - self.decode(message, part, x.dtype)
            state["residual"].copy_(error.view(-1)[:n])
        messages = yield AllGatherRequest(message)
        x.copy_(self.decode(messages, part, x.dtype).reshape(-1)[:n])

    def _scatter(
        self, rows: Tensor, out: Tensor, peers: ReplicaView, generator: torch.Generator | None
    ) -> Generator[CommRequest, Tensor, Tensor]:
        """Leaves in out the sum of this rank's rows; returns what the messages left out."""
        sent = self.encode(rows, generator)
        decoded = self.decode(sent, rows.shape[1], rows.dtype)
        own = decoded[peers.index].clone()
        error = torch.sub(rows, decoded, out=decoded)
        messages = yield ReduceScatterRequest(sent)
        self._add(messages, out, own, peers)
        return error

    def scatter(self, x: Tensor, out: Tensor, state: CodecState, peers: ReplicaView) -> Reduction:
        n = out.numel()
        rows = torch.zeros(
            peers.size, -(-n // self.block) * self.block, dtype=x.dtype, device=x.device
        )
        rows[:, :n] = x.view(peers.size, n)
        if self.feedback:
            rows[:, :n] += state["residual"].view(peers.size, n)
        padded = torch.empty_like(rows[0])
        error = yield from self._scatter(
            rows, padded, peers, self.generator(state, peers, x.device)
        )
        if self.feedback:
            state["residual"].view(peers.size, n).copy_(error[:, :n])
        out.copy_(padded[:n])

    def scatter_asks(self, n: int, peers: ReplicaView, itemsize: int) -> list[RequestSize]:
        return [RequestSize("scatter", self.nbytes(-(-n // self.block) * self.block), 1)]

    @property
    def scatters(self) -> bool:
        return not self.sparse

    def _part(self, n: int, peers: ReplicaView) -> int:
        """Elements that one rank sums for all."""
        return -(-n // peers.size // self.block) * self.block if n else 0

    def asks(
        self, shapes: Shapes, peers: ReplicaView, itemsize: int, step: int = 0
    ) -> list[RequestSize]:
        n = numel_of(shapes)
        if not (peers.sharded and peers.size > 2 and not self.sparse):
            return [RequestSize("gather", self.nbytes(n), 1)]
        part = self.nbytes(self._part(n, peers))
        return [RequestSize("scatter", part, 1), RequestSize("gather", part, 1)]


def generator_of(text: str, device: torch.device) -> torch.Generator:
    """Draws that a text tells from others."""
    seed = int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "big")  # bits it takes
    return torch.Generator(device).manual_seed(seed)


def numel_of(shapes: Shapes) -> int:
    """Elements of tensors of these shapes together."""
    return sum(prod(shape) for shape in shapes)
