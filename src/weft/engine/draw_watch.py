"""Finds out whether a forward draws random numbers that weft does not control."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.core import UnsupportedModel
from weft.pipeline import PlaceholderTensor


class DrawWatch:
    """Around forwards of the first step: one that draws without weft's overrides has to run again
    with them, and one that draws past them cannot be the same on every layout.

    Args:
        model: whose buffers, such as running statistics, a forward may change.
        generators: what the model draws from by torch.
    """

    def __init__(self, model: nn.Module, generators: Sequence[torch.Generator]):
        self._model, self._generators = model, generators
        self._states: list[Tensor] = []
        self._python: list[Any] = []
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def begin(self, seed: int) -> None:
        """A forward begins. `seed`: the same on all ranks, so that one that branches on what it
        draws takes the same way on all of them, and gets to its end."""
        for generator in self._generators:
            generator.manual_seed(seed)
        self._states = [generator.get_state() for generator in self._generators]
        outside = _python_states()
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        self._python = [outside, _python_states()]
        held = (b for b in self._model.buffers() if not isinstance(b, PlaceholderTensor))
        self._buffers = [(buffer, buffer.clone()) for buffer in held]

    def end(self) -> tuple[bool, bool]:
        """Whether it has drawn by torch, and by Python or numpy, whose states are put back."""
        outside, begun = self._python
        now, self._python = _python_states(), []
        random.setstate(outside[0])
        if "numpy" in sys.modules and len(outside) > 1:
            sys.modules["numpy"].random.set_state(outside[1])
        states = zip(self._states, self._generators, strict=True)
        drew = any(not torch.equal(state, each.get_state()) for state, each in states)
        return drew, repr(now) != repr(begun)

    def undo(self) -> None:
        """All is as it was before the forward."""
        for state, generator in zip(self._states, self._generators, strict=True):
            generator.set_state(state)
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        self._buffers = []


def _python_states() -> list[Any]:
    states: list[Any] = [random.getstate()]
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states.append((name, keys.copy(), *rest))
    return states


def undrawable(layout: object, by_torch: bool) -> UnsupportedModel:
    """The error for a forward that draws past what weft overrides."""
    how, seeds = "by Python's or numpy's generator, which", ""
    if by_torch:
        how, seeds = "by a function of torch that", ", or seeds torch's generator"
    return UnsupportedModel(
        "layout",
        str(layout),
        f"the model's forward draws random numbers {how} weft does not make the same on every"
        f" layout{seeds}",
        "draw by torch.rand, randn, randint, bernoulli, normal or their in-place forms, and drop"
        " out by nn.Dropout: between layers, not by the dropout of nn.LSTM or nn.GRU; leave seeds"
        " to weft",
    )
