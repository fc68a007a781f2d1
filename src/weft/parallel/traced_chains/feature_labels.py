"""Labels of the output features of linears, in classes of those that must stay on one rank."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor


class LabelClasses:
    """Labels 1, 2, ... in classes (union-find). Label 0 is no feature's.

    A dead class is one that cannot be divided: each rank needs all of it.
    """

    def __init__(self) -> None:
        self.columns: dict[str, tuple[int, int]] = {}  # linear -> (first label, features)
        self._parent = np.zeros(1, dtype=np.int64)
        self._dead = np.zeros(1, dtype=bool)

    def of_column(self, name: str, features: int) -> Tensor:
        """The labels [features] of a linear's output features; new at the first call."""
        if name not in self.columns:
            first = len(self._parent)
            self.columns[name] = first, features
            self._parent = np.append(self._parent, np.arange(first, first + features))
            self._dead = np.append(self._dead, np.zeros(features, dtype=bool))
        first, features = self.columns[name]
        return torch.arange(first, first + features)

    def classes(self, labels: Tensor) -> Tensor:
        """The class of each label; 0 where it is dead."""
        alive = np.where(self._dead[self._parent], 0, self._parent)  # few labels, of many elements
        return torch.from_numpy(np.asarray(alive[narrow(labels).numpy()])).expand(labels.shape)

    def join(self, one: Tensor, other: Tensor) -> Tensor:
        """The labels of what combines two tensors, broadcast; where both have one, they become one
        class."""
        shape = torch.broadcast_shapes(one.shape, other.shape)
        a, b = (t.numpy() for t in torch.broadcast_tensors(narrow(one), narrow(other)))
        both = (a != 0) & (b != 0)
        left, right = self._find(a[both]), self._find(b[both])
        apart, count = left != right, len(self._parent)  # one number for a pair: they sort faster
        pairs = np.stack(np.divmod(np.unique(left[apart] * count + right[apart]), count))
        while pairs.size:
            np.minimum.at(self._parent, pairs.max(axis=0), pairs.min(axis=0))
            while not np.array_equal(deeper := self._parent[self._parent], self._parent):
                self._parent = deeper  # every label has its root for a parent
            pairs = self._find(pairs)
            pairs = pairs[:, pairs[0] != pairs[1]]
        self._settle()
        return self.classes(torch.from_numpy(np.where(a == 0, b, a))).expand(shape)

    def join_along(self, labels: Tensor, dim: int) -> Tensor:
        """Labels with this dim of size 1: what combines all elements along it."""
        first = labels.narrow(dim, 0, 1)
        if labels.shape[dim] == 1 or labels.stride(dim) == 0:
            return self.classes(first)
        filled = _filled(narrow(labels), dim)
        count = filled.shape[dim] - 1
        self.join(filled.narrow(dim, 0, count), filled.narrow(dim, 1, count))
        return self.classes(filled.narrow(dim, 0, 1)).expand(first.shape)

    def kill(self, labels: Tensor) -> None:
        """Make the classes of these labels dead."""
        self._dead[np.unique(self._find(narrow(labels).numpy()))] = True
        self._dead[0] = False

    def _settle(self) -> None:
        """A class with all features of a column is dead, and so is one that has joined such."""
        self._dead[self._find(np.flatnonzero(self._dead))] = True
        for first, features in self.columns.values():
            roots = self._find(np.arange(first, first + features))
            if (roots == roots[0]).all():
                self._dead[roots[0]] = True

    def _find(self, labels: np.ndarray) -> np.ndarray:
        return self._parent[labels]


def narrow(labels: Tensor, dims: Iterable[int] | None = None) -> Tensor:
    """With size 1 along the dims, or these of them, along which it is expanded."""
    for dim in range(labels.ndim) if dims is None else dims:
        if labels.stride(dim) == 0 and labels.shape[dim] > 1:
            labels = labels.narrow(dim, 0, 1)
    return labels


def varies(labels: Tensor, dim: int) -> bool:
    """Whether labels change along a dim, not counting 0."""
    if labels.shape[dim] == 1 or labels.stride(dim) == 0:
        return False
    filled = _filled(narrow(labels), dim)
    return bool((filled != filled.narrow(dim, 0, 1)).any())


def _filled(labels: Tensor, dim: int) -> Tensor:
    """Labels with another of the same dim in the place of 0."""
    return torch.where(labels == 0, labels.amax(dim, keepdim=True), labels)
