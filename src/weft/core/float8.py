"""Which linears multiply in float8, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

OFF = "off"
# Names of torchao's recipes: one scale for each row of a factor (that is for each token, or output
# feature), the same with gradients of weights computed in bf16, or one scale for a whole factor.
RECIPES = ("rowwise", "rowwise_with_gw_hp", "tensorwise")
MULTIPLE = 16  # of the features of a linear: what a device's float8 products take


@dataclass(frozen=True)
class Float8Linears:
    """The linears that multiply in float8, and those that do not, each with the reason.

    `recipe` says how factors are scaled. `emulated`: factors are rounded to float8 and multiplied
    in float32, which runs on any device, and slowly.
    """

    recipe: str
    linears: tuple[str, ...]
    others: tuple[tuple[str, str], ...] = ()
    emulated: bool = False

    def within(self, kept: Callable[[str], bool]) -> Float8Linears:
        """The same of the modules whose names `kept` accepts."""
        return replace(
            self,
            linears=tuple(filter(kept, self.linears)),
            others=tuple((name, why) for name, why in self.others if kept(name)),
        )
