"""identity: gradients as they are, summed by the transport."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..codecs import Asked, Codec, Peers, Reduction, Scatter, Shapes, State, Sum, numel


@dataclass(frozen=True)
class Identity(Codec):
    name = "identity"

    def reduce(self, x: Tensor, state: State, shapes: Shapes, peers: Peers) -> Reduction:
        yield Sum(x)

    def scatter(self, x: Tensor, out: Tensor, state: State, peers: Peers) -> Reduction:
        out.copy_((yield Scatter(x.view(peers.size, -1), sums=True)))

    def asks(self, shapes: Shapes, peers: Peers, itemsize: int, step: int = 0) -> list[Asked]:
        return [Asked("sum", numel(shapes), itemsize)]

    def scatter_asks(self, n: int, peers: Peers, itemsize: int) -> list[Asked]:
        return [Asked("sum_scatter", n, itemsize)]


CODECS = {"identity": Identity}
