"""Which tensors follow from the batch without weights, and in which module calls they were made.

One that a call keeps for another call is missing where the first call is skipped."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor

from .structures import tensors_in


class DerivedTensors:
    """Those of one forward. They are held, so that their ids stay theirs."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Tensor, tuple[int, ...]]] = {}

    def add(self, made: Any, calls: Iterable[int]) -> None:
        """Tensors in `made`, in these calls."""
        for t in tensors_in(made):
            self._found.setdefault(id(t), (t, tuple(calls)))

    def follow(self, read: Iterable[Tensor], made: Any, calls: Iterable[int]) -> None:
        """A function made these of those."""
        if any(id(t) in self._found for t in read):
            self.add(made, calls)

    def calls(self, read: Iterable[Tensor], returned: Collection[int]) -> set[int]:
        """The calls in which tensors that are read were made, but for those that a call has
        `returned` (their ids)."""
        known = (id(t) for t in read if id(t) in self._found and id(t) not in returned)
        return {call for key in known for call in self._found[key][1]}
