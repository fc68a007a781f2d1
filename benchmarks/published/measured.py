"""What a few measured rows of a source say of its other rows: they move the constants of its
machine and software (`weft.planner.cost.belief`), and narrow the interval of each prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np
import rows as published

from weft.planner.cost.belief import PUBLISHED, Z80, Belief, ModelError, Move, slopes
from weft.planner.cost.hardware import Era

Cell = tuple[str, str]  # the name of a sheet, and an era: a machine and its software
Array = np.ndarray
GIVEN, PAIRS = 2, 5  # rows that are given, and so many times others
ENOUGH = 160  # rows of a source that choose the size of errors


class Steps:
    """Rows of one source, priced again and again with other constants. `groups` of settled
    cases, whose rows are named by their places."""

    def __init__(self, cases: Sequence[published.Case], eras: Mapping[Cell, Era]):
        named = [replace(case, row_id=str(place)) for place, case in enumerate(cases)]
        self._groups = published.grouped(published.settled(named, eras))
        cells: dict[int, Cell] = {}
        self.eras: dict[Cell, Era] = {}
        for group in self._groups:
            sheet, name = group.setting.cluster.hardware, group.setting.era
            cell = sheet.name, name
            own = sheet.eras.get(name) or sheet.eras.get("eager") or Era()
            self.eras[cell] = eras.get(cell) or own
            cells.update({int(row): cell for row in group.rows})
        self.cells = [cells[place] for place in range(len(cases))]

    def seconds(self, moves: Callable[[Cell], Move], places: Sequence[int] | None = None) -> Array:
        """Of all rows, or of those in these places, with the constants of each cell moved."""
        wanted = range(len(self.cells)) if places is None else places
        groups = self._groups
        if places is not None:
            names = {str(place) for place in places}
            groups = [group for group in groups if names.intersection(group.rows)]
        found = published.price(groups, {cell: moves(cell)(era) for cell, era in self.eras.items()})
        return np.array([found[str(place)][0].step_s[found[str(place)][1]] for place in wanted])

    def learned(self, belief: Belief, measured: Mapping[int, float]) -> dict[Cell, Belief]:
        """Cell -> what is believed of it after the rows in these places took so many seconds."""
        places = list(measured)

        def predict(move: Move) -> Array:
            return self.seconds(lambda cell: move, places)

        def of(cell: Cell) -> Belief:
            elsewhere = [self.cells[place] != cell for place in places]
            return belief.learn(predict, list(measured.values()), elsewhere)

        return {cell: of(cell) for cell in self.eras}

    def spread(self, beliefs: Mapping[Cell, Belief]) -> Array:
        """Of each row the standard deviation of the log of its seconds."""
        found = np.zeros(len(self.cells))
        for cell, belief in beliefs.items():
            those = [place for place, one in enumerate(self.cells) if one == cell]
            found[those] = belief.spread(
                lambda move, those=those: self.seconds(lambda cell: move, those)
            )
        return found


@dataclass(frozen=True)
class Residuals:
    """Of the rows of one source: the log of measured over predicted seconds, how the log of a step
    changes with the log of each constant, and which rows are of one cell."""

    left: Array
    slope: Array
    cell: Array


def residuals(steps: Steps, measured: Array) -> Residuals:
    logs, slope = slopes(
        lambda move: steps.seconds(lambda cell: move), np.zeros(len(Belief.of(PUBLISHED).shift))
    )
    _, cell = np.unique(["/".join(one) for one in steps.cells], return_inverse=True)
    return Residuals(np.log(measured) - logs, slope, cell)


def pairs(count: int) -> list[tuple[int, ...]]:
    """Which rows of so many are given: PAIRS of them, the same in every run."""
    every = list(combinations(range(count), GIVEN))
    chosen = np.random.default_rng(count).permutation(len(every))[:PAIRS]
    return [every[place] for place in sorted(chosen)]


# ---- how large errors are ------------------------------------------------------------------------


def intervals(one: Residuals, error: ModelError, given: Sequence[int]) -> tuple[Array, Array]:
    """To first order, of the rows that are not given: what is left of the logs, and its standard
    deviation."""
    belief = Belief.of(error)
    others = np.setdiff1d(np.arange(len(one.left)), given)
    cov = one.slope @ belief.covariance
    before = np.einsum("ij,ij->i", cov, one.slope)
    if not len(given):
        return one.left, np.sqrt(before + error.own**2)
    here = list(given)
    shared = np.where(one.cell[:, None] == one.cell[here][None], 1.0, 0.5)
    across = (cov @ one.slope[here].T) * shared
    inverse = np.linalg.inv(across[here] + np.eye(len(here)) * error.own**2)
    left = one.left - across @ inverse @ one.left[here]
    after = before - np.einsum("ij,jk,ik->i", across, inverse, across) + error.own**2
    return left[others], np.sqrt(np.maximum(after, error.own**2))[others]


def interval_score(left: Array, spread: Array) -> float:
    """Of intervals of 80 %: their width, and ten times by how far they miss (Gneiting and Raftery
    2007, equation 43): the least in the mean where intervals are as they should be."""
    half = Z80 * spread
    return float(np.mean(2 * half + 10 * np.maximum(np.abs(left) - half, 0)))


def chosen_error(several: Sequence[Residuals]) -> ModelError:
    """The sizes of errors whose intervals score best over these sources, before any row is given
    and after GIVEN are."""
    tried = [
        ModelError(spread, own)
        for spread, own in product((0.5, 1, 1.5, 2, 3, 4), (0.04, 0.06, 0.08, 0.1, 0.13, 0.16))
    ]
    fewer = []
    for one in several:
        every = -(-len(one.left) // ENOUGH)
        fewer.append(Residuals(one.left[::every], one.slope[::every], one.cell[::every]))

    def total(error: ModelError) -> float:
        found = 0.0
        for one in fewer:
            found += interval_score(*intervals(one, error, ()))
            after = [
                interval_score(*intervals(one, error, given)) for given in pairs(len(one.left))
            ]
            found += float(np.mean(after))
        return found

    return min(tried, key=total)


# ---- what it comes to ----------------------------------------------------------------------------


def after_given(
    steps: Steps, one: Residuals, measured: Array, error: ModelError
) -> dict[str, float]:
    """Over PAIRS choices of the rows that are given: the median error of the other rows, each
    priced anew with the constants that follow; and the share of rows that intervals of 80 % hold,
    before and after (their widths to first order)."""
    left, spread = intervals(one, error, ())
    found = {"held": float(np.mean(np.abs(left) <= Z80 * spread))}
    errors, held = [], []
    for given in pairs(len(measured)):
        beliefs = steps.learned(Belief.of(error), {at: float(measured[at]) for at in given})
        seconds = steps.seconds(lambda cell, known=beliefs: known[cell].move)
        others = np.setdiff1d(np.arange(len(measured)), given)
        wrong = np.log(measured / seconds)[others]
        _, spread = intervals(one, error, given)
        errors.append(float(np.median(np.abs(np.expm1(-wrong)))))
        held.append(float(np.mean(np.abs(wrong) <= Z80 * spread)))
    return found | {"after": float(np.median(errors)), "held_after": float(np.mean(held))}


# ---- rows that are given -------------------------------------------------------------------------


def speaks_of(row: published.Row, source: str) -> bool:
    """Whether a measured row tells of a source: one of its own, or one that names none."""
    return (row.get("source_id") or source) == source


def believed(
    cases: Sequence[published.Case],
    given: Sequence[tuple[published.Case, float]],
    eras: Mapping[Cell, Era],
) -> tuple[dict[Cell, Era], Array]:
    """The constants of these cases' machines and software after those given took so many seconds;
    and of each case the standard deviation of the log of its seconds. All are of one source."""
    steps = Steps([*cases, *(case for case, _ in given)], eras)
    measured = {len(cases) + at: took for at, (_, took) in enumerate(given)}
    prior = Belief.of(PUBLISHED)
    beliefs = steps.learned(prior, measured) if measured else dict.fromkeys(steps.eras, prior)
    moved = {cell: belief.move(steps.eras[cell]) for cell, belief in beliefs.items()}
    return moved, steps.spread(beliefs)[: len(cases)]
