"""This rank's part of what is of all positions."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


class OwnPositions:
    """`mine`: those of a sequence of `length` that this rank has, int64 [positions here]."""

    def __init__(self, length: int, mine: Tensor):
        self._length, self._mine = length, mine

    def cut(self, whole: Tensor, dims: Iterable[int]) -> Tensor:
        """The part of a tensor whose `dims` count positions, or samples and positions in one."""
        for dim in dims:
            if whole.shape[dim] == self._length:
                whole = whole.index_select(dim, self._mine.to(whole.device))
            else:
                each = whole.unflatten(dim, (-1, self._length))
                whole = self.cut(each, [dim + 1]).flatten(dim, dim + 1)
        return whole

    def are_all(self, part: Tensor, shape: Iterable[int]) -> bool:
        """Whether the dims in which a tensor differs from its whole one have a row for each."""
        sizes = [(x, y) for x, y in zip(part.shape, shape, strict=True) if x != y]
        return all(size == (len(self._mine), self._length) for size in sizes)
