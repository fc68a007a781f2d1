"""What every strategy is given: the model, what was found in it, and the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from weft.core import Layout, Part, Weight
from weft.nn import Roles


@dataclass(frozen=True)
class StepsRequest:
    """A model on a layout, for which a strategy emits Steps.

    Args:
        model: the module as written for one device; it may be on the meta device.
        weights: its parameters, each once.
        roles: its chains, experts, vocabulary and repeated blocks.
        layout: all axes and their options.
        sharded_logits: whether the loss takes logits that stay sharded over the vocabulary.
        parts: submodules whose weights some of the axes alone divide.
        units: modules that `fsdp` gathers together.
    """

    model: nn.Module
    weights: Sequence[Weight]
    roles: Roles
    layout: Layout
    sharded_logits: bool
    parts: Sequence[Part] = ()
    units: Sequence[tuple[str, ...]] = ()

    @cached_property
    def names(self) -> dict[str, str]:
        """Every name of a parameter, its aliases among them -> its first name."""
        return {alias: w.name for w in self.weights for alias in (w.name, *w.aliases)}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """First name of a parameter -> its shape on one device."""
        return {w.name: w.shape for w in self.weights}

    def divided(self, axis: str) -> set[str]:
        """First names of the weights that an axis divides, as far as parts say."""
        others = [part.weights for part in self.parts if axis not in part.placed.axes]
        return {w.name for w in self.weights}.difference(*others)
