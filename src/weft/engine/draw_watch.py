"""Finds out whether a forward draws random numbers though nothing in its modules says so."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DrawWatch:
    """Around a forward that runs without weft's dropout, which may have to run again with it.

    Args:
        model: whose buffers, such as running statistics, a forward may change.
        generator: what the model draws from.
    """

    def __init__(self, model: nn.Module, generator: torch.Generator):
        self._model, self._generator = model, generator
        self._state = generator.get_state()
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def begin(self) -> None:
        """A forward begins."""
        self._state = self._generator.get_state()
        self._buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]

    def drew(self) -> bool:
        """Whether it has drawn. If so, all is as it was before it."""
        if torch.equal(self._state, self._generator.get_state()):
            self._buffers = []
            return False
        self._generator.set_state(self._state)
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        self._buffers = []
        return True
