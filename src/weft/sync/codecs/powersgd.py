"""powersgd: a matrix as the product of two thin ones (Vogels et al. 2019), warm-started, with error
feedback.

M = gradient + residual, [m, n] with dim 0 of the tensor as m: P = sum of M Q, orthogonalised; Q =
sum of M^T P; M becomes P Q^T. A rank keeps M - P (M^T P)^T of its own M, so |residual| <= |M|.
Vectors, and matrices that two factors would not make smaller, are summed as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from weft.core import (
    AllReduceRequest,
    Codec,
    CodecState,
    Reduction,
    ReplicaView,
    RequestSize,
    Shapes,
    generator_of,
    require,
)


@dataclass(frozen=True)
class PowerSGD(Codec):
    rank: int = 4
    feedback: bool = True
    name = "powersgd"

    def __post_init__(self) -> None:
        require("sync.codec.rank", self.rank, int, lambda x: x > 0, "a whole number from 1")
        require("sync.codec.feedback", self.feedback, bool, lambda _: True, "true or false")

    @property
    def keeps_residual(self) -> bool:
        return self.feedback

    def state(self, shapes: Shapes, like: Tensor, bucket: str = "") -> CodecState:
        """The right factors, random ones, the same on every rank; and the residual."""
        generator = generator_of(bucket, torch.device("cpu"))
        size = sum(n * r for _, n, r in self._matrices(shapes))
        right = torch.randn(size, generator=generator, dtype=like.dtype).to(like.device)
        return {"right": right} | ({"residual": torch.zeros_like(like)} if self.feedback else {})

    def reduce(self, x: Tensor, state: CodecState, shapes: Shapes, peers: ReplicaView) -> Reduction:
        matrices, plain, kept = [], [], []
        offset = 0
        for shape in shapes:
            size = prod(shape)
            part = x[offset : offset + size]
            if self._thin(shape):
                matrices.append(part.view(shape[0], -1))
                kept.append(
                    state["residual"][offset : offset + size].view(shape[0], -1)
                    if self.feedback
                    else None
                )
            else:
                plain.append(part)
            offset += size
        sizes = list(self._matrices(shapes))
        rights = _views(state["right"], [(n, r) for _, n, r in sizes])
        first = x.new_empty(sum(m * r for m, _, r in sizes) + sum(p.numel() for p in plain))
        lefts = _views(first, [(m, r) for m, _, r in sizes] + [(p.numel(),) for p in plain])
        for matrix, left, right, residual in zip(matrices, lefts, rights, kept, strict=False):
            if residual is not None:
                matrix.add_(residual)
            torch.mm(matrix, right, out=left)
        for part, view in zip(plain, lefts[len(sizes) :], strict=True):
            view.copy_(part)
        yield AllReduceRequest(first, final=not matrices)
        for part, view in zip(plain, lefts[len(sizes) :], strict=True):
            part.copy_(view)
        if not matrices:
            return
        for matrix, left, right, residual in zip(matrices, lefts, rights, kept, strict=False):
            left.copy_(torch.linalg.qr(left).Q)
            torch.mm(matrix.T, left, out=right)
            if residual is not None:
                torch.addmm(matrix, left, right.T, alpha=-1, out=residual)
        # a rank that is given no answer keeps its own: the next one's start, not its result
        yield AllReduceRequest(state["right"], final=False)
        for matrix, left, right in zip(matrices, lefts, rights, strict=False):
            torch.mm(left, right.T, out=matrix)

    def _matrices(self, shapes: Shapes) -> Iterator[tuple[int, int, int]]:
        """(m, n, rank) of each tensor that is factored."""
        for shape in shapes:
            if self._thin(shape):
                yield shape[0], prod(shape[1:]), min(self.rank, shape[0], prod(shape[1:]))

    def _thin(self, shape: tuple[int, ...]) -> bool:
        return len(shape) > 1 and (shape[0] + prod(shape[1:])) * self.rank < prod(shape)

    def asks(
        self, shapes: Shapes, peers: ReplicaView, itemsize: int, step: int = 0
    ) -> list[RequestSize]:
        sizes = list(self._matrices(shapes))
        plain = sum(prod(shape) for shape in shapes if not self._thin(shape))
        first = sum(m * r for m, _, r in sizes) + plain
        second = (
            [RequestSize("sum", sum(n * r for _, n, r in sizes), itemsize, final=False)]
            if sizes
            else []
        )
        return [RequestSize("sum", first, itemsize, final=not sizes), *second]


def _views(flat: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Tensors of these shapes, one after the other in `flat`."""
    return [
        part.view(shape)
        for part, shape in zip(flat.split([prod(s) for s in shapes]), shapes, strict=True)
    ]


CODECS = {"powersgd": PowerSGD}
