"""identity: gradients as they are, summed by the transport."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.core import (
    AllReduceRequest,
    Codec,
    CodecState,
    ReduceScatterRequest,
    Reduction,
    ReplicaView,
    RequestSize,
    Shapes,
    numel_of,
)


@dataclass(frozen=True)
class Identity(Codec):
    name = "identity"

    def reduce(self, x: Tensor, state: CodecState, shapes: Shapes, peers: ReplicaView) -> Reduction:
        yield AllReduceRequest(x)

    def scatter(self, x: Tensor, out: Tensor, state: CodecState, peers: ReplicaView) -> Reduction:
        out.copy_((yield ReduceScatterRequest(x.view(peers.size, -1), sums=True)))

    def asks(
        self, shapes: Shapes, peers: ReplicaView, itemsize: int, step: int = 0
    ) -> list[RequestSize]:
        return [RequestSize("sum", numel_of(shapes), itemsize)]

    def scatter_asks(self, n: int, peers: ReplicaView, itemsize: int) -> list[RequestSize]:
        return [RequestSize("sum_scatter", n, itemsize)]


CODECS = {"identity": Identity}
