"""Finds out whether a forward draws random numbers that weft does not control, and whether these
change what runs: a model may draw for each layer whether it is left out, with a chance of zero."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from weft._torch.trees import tree_leaves
from weft.core import UnsupportedModel
from weft.pipeline import PlaceholderTensor

LEAST, MOST = 0, 2**32 - 1  # what Mersenne Twister gives
_EXTREME = 512  # of its 624 numbers; then others come, so that who waits for one gets it


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

    def begin(self, seed: int, number: int | None = None) -> None:
        """A forward begins.

        Args:
            seed: the same on all ranks, so that one that branches on what it draws takes the same
                way on all of them, and gets to its end.
            number: what Python's and numpy's generators give at first, LEAST or MOST.
        """
        for generator in self._generators:
            generator.manual_seed(seed)
        self._states = [generator.get_state() for generator in self._generators]
        outside = _python_states()
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        if number is not None:
            _give_at_first(number)
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

    def changes(self, forward: Callable[[], Any], seed: int) -> bool:
        """Whether what `forward` gives, or what backward would go through, depends on numbers by
        Python or numpy. Buffers then are as the forward that has ended left them."""
        left = [(buffer, buffer.clone()) for buffer, _ in self._buffers]
        found = []
        for number in (LEAST, MOST):
            self.undo()
            self.begin(seed, number)
            tensors = tree_leaves(forward(), Tensor)
            found.append(([*_graph(tensors)], [t.detach() for t in tensors]))
            self.end()
        _put_back(left)
        (path, least), (other, most) = found
        return path != other or not all(map(torch.equal, least, most))

    def undo(self) -> None:
        """All is as it was before the forward."""
        for state, generator in zip(self._states, self._generators, strict=True):
            generator.set_state(state)
        _put_back(self._buffers)


@contextmanager
def draws_seeded(model: nn.Module, device: torch.device, seed: int) -> Iterator[None]:
    """Inside of this context torch, Python and numpy draw from this seed on; after it they go on
    as if nothing had been drawn."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        watch = DrawWatch(model, default_generators(device))
        watch.begin(seed)
        try:
            yield
        finally:
            watch.end()


def default_generators(device: torch.device) -> list[torch.Generator]:
    """What torch draws from, on the host and on a device."""
    found = [torch.default_generator]
    if device.type == "cuda":
        found.append(torch.cuda.default_generators[device.index or 0])
    return found


def _put_back(buffers: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Of tensors with what they held: a backward may still read those that are as they were."""
    for buffer, held in buffers:
        if not torch.equal(buffer, held):
            buffer.data.copy_(held)


def _python_states() -> list[Any]:
    states: list[Any] = [random.getstate()]
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states.append((name, keys.copy(), *rest))
    return states


def _give_at_first(number: int) -> None:
    """Make Python's and numpy's generator give a number, time and again."""
    version, held, gauss = random.getstate()
    word = _untempered(number)
    words = (word,) * _EXTREME + held[_EXTREME:-1]
    random.setstate((version, (*words, 0), gauss))
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        numpy.random.set_state(("MT19937", numpy.array(words, dtype=numpy.uint32), 0))


def _untempered(number: int) -> int:
    """The word of Mersenne Twister's state that gives a number (Matsumoto and Nishimura 1998): each
    of its four steps is undone by repeating it, as it is right in more bits each time."""
    steps: tuple[Callable[[int], int], ...] = (
        lambda x: x >> 18,
        lambda x: x << 15 & 0xEFC60000,
        lambda x: x << 7 & 0x9D2C5680,
        lambda x: x >> 11,
    )
    for step in steps:
        after = number
        for _ in range(5):
            number = after ^ step(number)
    return number


def _graph(tensors: Sequence[Tensor]) -> Iterator[str]:
    """What backward from these tensors goes through."""
    seen, left = set[Any](), [t.grad_fn for t in tensors]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node.name()
            left += [before for before, _ in node.next_functions]


def undrawable(layout: object, by_torch: bool) -> UnsupportedModel:
    """The error for a forward that draws past what weft overrides."""
    how, rest = "by Python's or numpy's generator, which", ", and what runs depends on them"
    zero = "; or set to zero the chance that they are drawn for, as layerdrop in the configuration"
    if by_torch:
        how, rest, zero = "by a function of torch that", ", or seeds torch's generator", ""
    return UnsupportedModel(
        "layout",
        str(layout),
        f"the model's forward draws random numbers {how} weft does not make the same on every"
        f" layout{rest}",
        "draw by torch.rand, randn, randint, bernoulli, normal, multinomial, or in place, and drop"
        " out by nn.Dropout: between layers, not by the dropout of nn.LSTM or nn.GRU; leave seeds"
        f" to weft{zero}",
    )
