"""Tensors as a few numbers each, by which two can be compared that are never in one place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PROBES = 8  # the norm of a difference is known to a quarter; none of any size goes unseen


class RandomProjection:
    """Inner products of a tensor with random ones, the same on every rank.

    The random tensors are outer products of one normal vector for each dim, so that the root mean
    square of what two tensors' projections differ by is about the norm of their difference. The
    projection is linear: those of parts of a tensor add up to that of the whole (Johnson and
    Lindenstrauss 1984; products of vectors: Rudelson 2012).
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._vectors: dict[tuple[int, int], Tensor] = {}

    def __call__(
        self, part: Tensor, rows: Sequence[Tensor | None], shape: Sequence[int] | None = None
    ) -> Tensor:
        """[PROBES] in float64.

        Args:
            part: a part of a tensor.
            rows: for each dim, which of the whole tensor's rows this is; None: all.
            shape: of the whole tensor. Default: the part's own.
        """
        found = part.detach().double()
        for dim in reversed(range(part.ndim)):
            size = part.shape[dim] if shape is None else shape[dim]
            vectors, mine = self._of(dim, size), rows[dim]
            if mine is not None:
                vectors = vectors[mine]
            last = dim == part.ndim - 1
            found = found @ vectors if last else (found * vectors).sum(-2)
        return found if part.ndim else found.expand(PROBES)

    def _of(self, dim: int, size: int) -> Tensor:
        if (dim, size) not in self._vectors:
            generator = torch.Generator().manual_seed(1009 * size + dim)
            vectors = torch.randn(size, PROBES, dtype=torch.float64, generator=generator)
            self._vectors[dim, size] = vectors.to(self._device)
        return self._vectors[dim, size]


def size_of(projection: Tensor) -> Tensor:
    """The norm of what has this projection [..., PROBES], about: [...]."""
    return projection.square().mean(-1).sqrt()
