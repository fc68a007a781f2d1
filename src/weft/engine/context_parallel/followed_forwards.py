"""Which forwards of a part of the positions are followed: the first one of its shapes, and others
if that changed what the model computes. Following takes time."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from ..microbatch import MicroBatch
from .counts_by_size import CountsBySize
from .followed_shapes import FollowedShapes
from .known_sequences import KnownSequences


class FollowedForwards:
    """Of one model on one rank."""

    def __init__(self, layout: str) -> None:
        self._layout = layout
        self._shapes = FollowedShapes()
        self._first: dict[Hashable, KnownSequences] = {}

    def begin(
        self,
        micro: MicroBatch,
        mine: Tensor,
        made: Callable[[Tensor], Tensor],
        counts: CountsBySize | None,
    ) -> KnownSequences | None:
        """What follows the forward of a microbatch; None if nothing does. The arguments are those
        of KnownSequences."""
        now = micro.sequence
        key = micro.signature, now.valid is None, now.documents is None, torch.is_grad_enabled()
        first = self._first.get(key)
        if first is None:
            first = KnownSequences(now.length, mine, self._shapes, made, counts, self._layout)
            self._first[key] = first
            return first
        first.begin()
        return first if first.used else None

    def forget(self) -> None:
        """The next forward is followed: the last one did not end, or was of other modules."""
        self._first.clear()
