"""What a function under torch.utils.checkpoint has drawn, or asked of all ranks: backward computes
the function again, and must get the same. Torch puts its own generator back; weft's numbers follow
from the place in the program, which backward does not pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from weft._torch.autograd import in_backward, recomputation, rerun_by
from weft.core import ActivationSharding, UnsupportedModel

from .dropout_rng import Randomness


class Kept(NamedTuple):
    """A value of a forward: for which samples, and how activations are cut there."""

    value: Tensor
    samples: Tensor
    activation_sharding: ActivationSharding


class RepeatedDraws:
    """Of one rank: the keys of draws, and what was asked of all ranks, as long as backward may need
    them again. A function gets them in the order in which its forward did."""

    def __init__(self) -> None:
        self._kept = WeakKeyDictionary[Any, list[Kept]]()
        self._repeated = WeakKeyDictionary[Any, Counter[Hashable]]()

    def __bool__(self) -> bool:
        """Whether backward may need something again."""
        return bool(self._kept)

    def repeat(self, what: object, randomness: Randomness) -> Tensor | None:
        """The value that this call had in the forward, whose place `randomness` then has; None if
        this is a forward. `what` is drawn or asked for. Raises UnsupportedModel where nothing tells
        which value it is."""
        now = recomputation()
        if now is None:
            return None
        if now.backward is None or now.call is randomness.own_call:
            if in_backward() and not randomness.repeated:
                raise _unknown(what, "is inside of another one under it")
            return None
        kept = self._kept.get(now.call, [])
        counts = self._repeated.setdefault(now.call, Counter())
        number, counts[now.backward] = counts[now.backward], counts[now.backward] + 1
        if number >= len(kept):
            raise _unknown(what, "asks for it more often in backward than in the forward")
        value, randomness.samples, randomness.activation_sharding = kept[number]
        return value

    def keep(self, value: Tensor, randomness: Randomness) -> None:
        """A forward has drawn with this key, or got this answer."""
        now = recomputation()
        if now is not None and now.call is not randomness.own_call:
            kept = Kept(value, randomness.samples, randomness.activation_sharding)
            self._kept.setdefault(now.call, []).append(kept)


@contextmanager
def place_kept(randomness: Randomness) -> Iterator[None]:
    """Around a backward inside of a forward, which may compute functions again: after it the
    forward goes on where it was."""
    before = {**vars(randomness), "passes": dict(randomness.passes)}
    try:
        yield
    finally:
        vars(randomness).update(before, drawn=randomness.drawn)


def rerun_of_model(randomness: Randomness) -> str:
    """What of the model runs this forward, and will run it again in backward; "" if nothing does.
    Of a graph BlockForward has checked it."""
    if torch.compiler.is_compiling():
        return ""
    now = recomputation() if torch.is_grad_enabled() else None
    return "" if now is not None and now.call is randomness.own_call else rerun_by()


def _unknown(what: object, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        "torch.utils.checkpoint",
        what,
        f"the function that needs it {why}, so nothing tells which value the forward had",
        'leave torch.utils.checkpoint out and set train.recompute = "full"',
    )
