"""How sure the seconds of priced layouts are, and which of them cannot be told apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from ..cost.belief import Z80, Belief, Move
from ..cost.layout_batch import Array, LayoutBatch
from .query import PlanQuery
from .ranking import RankedLayout


@dataclass(frozen=True)
class Certainty:
    """Of priced layouts, in their order. `low_s`, `high_s`: seconds between which a measured step
    is in 80 of 100 cases; `alike[i, j]`: whether either of two may be the faster one: the same
    interval of their ratio holds 1. What is wrong with both alike cancels in a ratio."""

    names: Sequence[str]
    low_s: Array
    high_s: Array
    alike: Array

    @classmethod
    def of(cls, question: PlanQuery, belief: Belief, rows: Sequence[RankedLayout]) -> Self:
        """`belief` is about the constants of `question.era`."""
        seconds = np.array([row.step_s for row in rows])
        choices = LayoutBatch.joined([row.chosen.choices for row in rows])

        def predict(move: Move) -> Array:
            return question.moved(move).price(choices).step_s

        factor = belief.factor(predict)
        apart = np.abs(np.log(seconds[:, None] / seconds[None]))
        alike = apart <= Z80 * belief.spread_of_ratios(predict)
        return cls([row.layout for row in rows], seconds / factor, seconds * factor, alike)

    def interval_text(self, place: int) -> str:
        """As in `9.41-12.1`."""
        return f"{self.low_s[place]:.3g}-{self.high_s[place]:.3g}"

    def interval(self, place: int) -> dict[str, float]:
        """Of one layout, for programs."""
        low, high = float(self.low_s[place]), float(self.high_s[place])
        return {"step_s_low": low, "step_s_high": high}

    def as_fast_as(self, place: int) -> list[str]:
        """The others that one layout cannot be told apart from."""
        others = [name for name, same in zip(self.names, self.alike[place]) if same]
        return [name for name in others if name != self.names[place]]

    def text(self, numbered: bool) -> str:
        """Which layouts cannot be told apart from the fastest, by their numbers or their names;
        empty if all can."""
        # a table's first row is the best; of layouts that are compared it is the fastest
        first = 0 if numbered else int((self.low_s * self.high_s).argmin())
        others = [int(at) for at in np.flatnonzero(self.alike[first]) if at != first]
        if not others:
            return ""
        names = _places(others) if numbered else ", ".join(self.names[at] for at in others)
        best = first + 1 if numbered else self.names[first]
        return (
            f"too close to {best} to tell which is faster: {names}; measure some of them,"
            " and give --measured"
        )


def _places(places: Sequence[int]) -> str:
    """As in `2-8, 10`, counted from 1."""
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][-1] + 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return ", ".join(
        f"{run[0] + 1}-{run[-1] + 1}" if len(run) > 1 else f"{run[0] + 1}" for run in runs
    )
