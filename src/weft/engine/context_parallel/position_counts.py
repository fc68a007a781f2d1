"""Integers that follow from how many positions there are.

A rank's model sees a part of the positions. Its integers say how many these are; each also carries
what it would be with all positions, so that what is made of it can be made for all. No integer is
taken for a number of positions because it equals one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any


def _nobody() -> None:
    pass


class PositionCount(int):
    """An integer of this rank's part. `whole`: what it is of the whole sequence. Sums, products and
    quotients with integers are of both. A fraction, `<` and `>` are of the whole, as on one
    device; `used` is told of each answer that the part's own integer would not give."""

    whole: int
    used: Callable[[], None]

    def __new__(cls, here: int, whole: int, used: Callable[[], None] = _nobody) -> PositionCount:
        made = super().__new__(cls, here)
        made.whole, made.used = whole, used
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PositionCount):
            same, here = self.whole == other.whole, int(self) == int(other)
        else:  # an integer of no position, or one that was not followed
            here = int(self) == other
            same = here or self.whole == other
        if same != here:
            self.used()
        return same

    def __bool__(self) -> bool:
        if bool(self.whole) != (int(self) != 0):
            self.used()
        return bool(self.whole)

    def __float__(self) -> float:
        """Of the whole, as `math.sqrt` takes it too; `math.log` reads the integer itself."""
        self.used()
        return float(self.whole)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(int(self))


def whole_number(x: Any) -> Any:
    """What an integer is of the whole sequence; anything else, as it is."""
    return x.whole if isinstance(x, PositionCount) else x


def count(here: int, whole: int, used: Callable[[], None] = _nobody) -> int:
    """An integer that is `whole` with all positions."""
    return here if here == whole else PositionCount(here, whole, used)


def _here(x: Any) -> Any:
    return int(x) if isinstance(x, PositionCount) else x


def _computed(function: Callable[..., Any], swapped: bool) -> Callable[..., Any]:
    def of_both(self: PositionCount, *others: Any) -> Any:
        def value(of: Callable[[Any], Any]) -> Any:
            given = [of(self), *map(of, others)]
            return function(*(reversed(given) if swapped else given))

        if any(not isinstance(x, int | float) for x in others):
            return NotImplemented
        whole = value(whole_number)
        if type(whole) is int:
            return count(value(_here), whole, self.used)
        self.used()
        return whole

    return of_both


def _compared(function: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def of_the_whole(self: PositionCount, other: Any) -> bool:
        found = function(self.whole, whole_number(other))
        if found != function(int(self), _here(other)):
            self.used()
        return found

    return of_the_whole


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _function = getattr(operator, _name)
    setattr(PositionCount, f"__{_name}__", _computed(_function, False))
    setattr(PositionCount, f"__r{_name}__", _computed(_function, True))
for _name in ("neg", "pos", "abs"):
    setattr(PositionCount, f"__{_name}__", _computed(getattr(operator, _name), False))
for _name in ("lt", "le", "gt", "ge"):
    setattr(PositionCount, f"__{_name}__", _compared(getattr(operator, _name)))
