"""What an axis of a layout divides and allows, as data: each file of parallel/strategies
declares it beside its steps. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Divides(StrEnum):
    """What the ranks of an axis divide among them."""

    SAMPLES = "samples"  # of the batch
    POSITIONS = "positions"  # of each sample's sequence, through the whole model
    FEATURES = "features"  # heads and hidden features inside of blocks
    VOCABULARY = "vocabulary"  # rows of the embedding and of the head
    ATTENTION_HEADS = "attention heads"  # during attention alone, in exchange for positions
    EXPERTS = "experts"  # of each mixture of experts
    STAGES = "stages"  # of the model: a pipeline
    STATE = "state"  # stored parameters, gradients and optimizer state, not the computation


ONE_AXIS_ALONE = (Divides.FEATURES, Divides.VOCABULARY, Divides.STAGES)  # not two at once


@dataclass(frozen=True)
class AxisTraits:
    """What an axis divides, where it lies, and what may be asked of it.

    Args:
        divides: what its ranks divide; they hold everything else alike.
        order: place in a layout that a search makes: the axis with the lowest one is outermost.
        spreads_experts: whether it takes the option `ep`: experts then lie on its ranks too.
        within_node: whether a search keeps it, with the axes inside of it that say the same, within
            a node.
        searched: whether a search tries it where a pattern does not name it.
        shrinks_freely: whether a run that continues on fewer ranks may take any size of it; else a
            divisor.
        written_as: an option of it that another axis does alone -> that axis, under which a search
            has it.
    """

    divides: frozenset[Divides]
    order: int
    spreads_experts: bool = False
    within_node: bool = False
    searched: bool = True
    shrinks_freely: bool = False
    written_as: Mapping[str, str] = field(default_factory=dict)

    @property
    def divides_tokens(self) -> bool:
        """Whether its ranks compute with other tokens."""
        return bool(self.divides & {Divides.SAMPLES, Divides.POSITIONS})


@dataclass(frozen=True)
class AxisTable:
    """The axes there are, outermost first, each with its traits."""

    traits: Mapping[str, AxisTraits] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.traits)

    def dividing(self, *what: Divides) -> tuple[str, ...]:
        """The axes that divide any of these."""
        return tuple(axis for axis, t in self.traits.items() if t.divides & frozenset(what))

    def twice_divided(self, axes: Iterable[str]) -> tuple[str, str, Divides] | None:
        """Two of these axes that divide what one axis alone may divide, and what it is."""
        holder: dict[Divides, str] = {}
        for axis in axes:
            for what in ONE_AXIS_ALONE:
                if what in self.traits[axis].divides:
                    if what in holder:
                        return holder[what], axis, what
                    holder[what] = axis
        return None
