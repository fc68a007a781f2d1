"""The layouts that fit, the fastest first: priced in closed form, the best few simulated event by
event.

Pipelines are priced with 1F1B first, which needs the least memory. Where they could come among the
best without their bubble, which no schedule can be rid of more than wholly, they are priced with
every other schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from weft.core import (
    REPLICA_AXIS,
)
from weft.parallel import (
    EXPERT_AXES,
    STATE_AXES,
)
from weft.pipeline import simulate

from ..cluster_sim.scenario import Scenario, follows_pipeline
from ..cost.breakdown import CostPart, TimePart
from ..cost.estimate import Estimate
from ..cost.hardware import GIB
from ..cost.layout_batch import AXES, Array, LayoutBatch
from .candidates import Candidates, fewer_devices, find_candidates, join_candidates, with_schedules
from .layout_pattern import ANY, LayoutPattern
from .query import PlanQuery

SLICE = 50_000  # choices that are priced at once
RESCHEDULED = 4_000  # pipelines at most that are priced with every schedule
LAYOUTS = 36  # that are looked at more closely
EACH = 3  # choices of each of these
ACTIONS = 150_000  # that are simulated, over all
COUNTS = 8  # numbers of devices that are tried where not all can be used
TIE = 0.01  # times that differ by less are no reason to have one more axis

Progress = Callable[[int, int], None]  # choices priced, of how many


class Prices(NamedTuple):
    """Of each choice: seconds of a step, and of them those that a pipeline waits; bytes that it is
    over by. Where some fit, those that do not take infinitely long."""

    step_s: Array
    bubble_s: Array
    over_bytes: Array


@dataclass(frozen=True)
class RankedLayout:
    """One choice, priced. `time`: parts, whose sum is `step_s`; `memory`: parts, whose sum, and
    what the driver keeps, are `held_bytes`, which must fit; `process_bytes`: what is taken where
    there is more. `traffic`: bytes that a rank sends over each axis in a step. `chosen` is it
    alone."""

    layout: str
    schedule: str
    options: Mapping[str, int]
    microbatch: int
    accumulate: int
    recompute: str | int | tuple[str, ...]
    step_s: float
    tokens_per_s: float
    mfu: float
    held_bytes: float
    process_bytes: float
    over_bytes: float
    time: Mapping[str, float]
    memory: Mapping[str, float]
    traffic: Mapping[str, float]
    simulated: bool
    chosen: Candidates = field(repr=False, compare=False)
    time_parts: tuple[CostPart, ...] = field(repr=False, compare=False)
    memory_parts: tuple[CostPart, ...] = field(repr=False, compare=False)

    @property
    def fits(self) -> bool:
        return self.over_bytes <= 0


@dataclass(frozen=True)
class Ranking:
    """`rows`: the best of each layout, best first. They fit, or, where `fits` is false, are nearest
    to it. `priced` and `simulated` choices; `exhaustive`: whether conventions were ignored, or else
    which `conventions` left out others; `devices` in use; `compared`: where several layouts were
    given, these rows in that order."""

    rows: tuple[RankedLayout, ...]
    fits: bool
    priced: int
    simulated: int
    devices: int
    exhaustive: bool
    conventions: frozenset[str] = frozenset()
    compared: tuple[RankedLayout, ...] = ()


def rank(
    question: PlanQuery,
    pattern: LayoutPattern = ANY,
    exhaustive: bool = False,
    progress: Progress = lambda done, of: None,
) -> Ranking:
    """The best layouts of a pattern.

    If none fits, those against conventions are searched too. If the rules allow none on all
    devices, or these neither fill nodes nor part one evenly, the fastest on a few fewer devices is
    taken. No rows: the rules allow none at all.
    """
    devices, node = question.cluster.devices, question.cluster.hardware.node
    found = _search(question, pattern, devices, exhaustive, progress)
    if found.rows and (node % devices == 0 or devices % node == 0):
        return found
    for count in fewer_devices(question, pattern, devices, COUNTS):
        other = _search(question, pattern, count, exhaustive, progress)
        if other.rows and (not found.rows or _better(other, found)):
            found = other
    return found


def _search(
    question: PlanQuery, pattern: LayoutPattern, devices: int, exhaustive: bool, progress: Progress
) -> Ranking:
    """On so many devices; without conventions, if nothing fits with them."""
    found = _rank_devices(question, pattern, devices, exhaustive, progress)
    return (
        found
        if found.fits or exhaustive
        else _rank_devices(question, pattern, devices, True, progress)
    )


def _better(one: Ranking, other: Ranking) -> bool:
    """Whether fewer devices are to be preferred."""
    if one.fits and other.fits:
        return one.rows[0].step_s * (1 + TIE) < other.rows[0].step_s
    return one.fits > other.fits or one.rows[0].over_bytes < other.rows[0].over_bytes


def _rank_devices(
    question: PlanQuery, pattern: LayoutPattern, devices: int, exhaustive: bool, progress: Progress
) -> Ranking:
    found = find_candidates(question, devices, pattern, exhaustive)
    count = len(found)
    prices = price(question, found, progress)
    fits = prices.over_bytes <= 0
    if fits.any():
        found, prices = found.take(fits), _take(prices, fits)
        more = with_schedules(found.take(_promising(found, prices)), question, pattern, exhaustive)
        if len(more):
            count += len(more)
            added = price(question, more, progress)
            also = added.over_bytes <= 0
            found = join_candidates([found, more.take(also)])
            prices = _joined([prices, _take(added, also)])
        order = _order(prices.step_s, axis_count(found.choices))
    else:
        order = np.lexsort((prices.step_s, prices.over_bytes))
    chosen = found.take(_leading(found.kinds[order], order))
    rows = rows_of(question, chosen)
    if fits.any():
        rows = simulate_rows(question, rows)
        again = _order(np.array([row.step_s for row in rows]), axis_count(chosen.choices))
        rows = [rows[place] for place in again]
    best: dict[str, RankedLayout] = {}
    for row in rows:
        best.setdefault(row.layout, row)
    run = sum(row.simulated for row in rows)
    return Ranking(
        tuple(best.values()), bool(fits.any()), count, run, devices, exhaustive, found.conventions
    )


def axis_count(choices: LayoutBatch) -> Array:
    """How many axes each has, with what spreads experts beside its own as one more."""
    live = sum((choices.sizes[axis] > 1).astype(int) for axis in AXES)
    return live + (choices.experts > choices.size(*EXPERT_AXES)) + choices.offload


def _order(step_s: Array, count: Array) -> Array:
    """The fastest first; among those within TIE, those with the fewest axes."""
    near = np.floor(np.log(step_s / step_s.min()) / np.log1p(TIE)) if len(step_s) else step_s
    return np.lexsort((step_s, count, near))


def price(
    question: PlanQuery, found: Candidates, progress: Progress = lambda done, of: None
) -> Prices:
    """All of these, slice by slice: first their memory, then the time of those that fit, or of all
    if none does."""
    over = np.concatenate(
        [np.zeros(0)]
        + [question.missing_memory(found.choices.take(part)) for part in _slices(len(found))]
    )
    prices = Prices(np.full(len(found), np.inf), np.zeros(len(found)), over)
    places = np.flatnonzero(over <= 0) if (over <= 0).any() else np.arange(len(found))
    progress(len(found) - len(places), len(found))
    for part in _slices(len(places)):
        made = question.price(found.choices.take(places[part]))
        prices.step_s[places[part]] = made.step_s
        prices.bubble_s[places[part]] = _part(made.time, TimePart.BUBBLE)
        progress(len(found) - len(places) + int(part[-1]) + 1, len(found))
    return prices


def _slices(count: int) -> list[Array]:
    """Places up to `count`, SLICE at a time."""
    return [np.arange(start, min(start + SLICE, count)) for start in range(0, count, SLICE)]


def _take(prices: Prices, places: Array) -> Prices:
    return Prices(*(each[places] for each in prices))


def _joined(parts: Sequence[Prices]) -> Prices:
    return Prices(*(np.concatenate(each) for each in zip(*parts)))


def priced_best(question: PlanQuery, found: Candidates) -> RankedLayout | None:
    """Of these the fastest that fits, or else the nearest to it; none of none."""
    if not len(found):
        return None
    prices = price(question, found)
    first = np.lexsort((prices.step_s, prices.over_bytes))[0]
    return rows_of(question, found.take(np.array([first])))[0]


def _part(parts: Sequence[CostPart], name: str) -> Array:
    return next(part.value for part in parts if part.name == name)


def _promising(found: Candidates, prices: Prices) -> Array:
    """Of those that fit, the ones that another schedule could bring among the best layouts."""
    order = _order(prices.step_s, axis_count(found.choices))
    leading = _leading(found.kinds[order], order, each=1)
    within = prices.step_s[leading].max()
    bound = prices.step_s - prices.bubble_s
    able = np.flatnonzero((found.choices.stage_ranks > 1) & (bound <= within))
    return able[np.argsort(bound[able], kind="stable")[:RESCHEDULED]]


def _leading(kinds: Array, order: Array, each: int = EACH) -> Array:
    """Of places in order, the first `each` of every kind, of the first LAYOUTS kinds."""
    _, first = np.unique(kinds, return_index=True)
    kept = kinds[np.sort(first)[:LAYOUTS]]
    chosen: list[int] = []
    for kind in kept:
        chosen += np.flatnonzero(kinds == kind)[:each].tolist()
    return order[np.array(sorted(chosen), dtype=np.int64)]


def rows_of(question: PlanQuery, found: Candidates) -> list[RankedLayout]:
    """Each priced, in the order given."""
    made = question.price(found.choices)
    return [_row(question, made, found, index) for index in range(len(found))]


def _row(question: PlanQuery, made: Estimate, found: Candidates, index: int) -> RankedLayout:
    c = found.choices
    name, options = found.schedule(index)
    return RankedLayout(
        str(found.layout(index)),
        name,
        options,
        int(c.microbatch[index]),
        int(c.accumulate[index]),
        found.recompute(index),
        float(made.step_s[index]),
        float(made.tokens_per_s[index]),
        float(made.mfu[index]),
        float(made.peak_bytes[index]) + question.era.context_gib * GIB,
        float(made.process_bytes[index]),
        float(made.over_bytes[index]),
        {part.name: float(part.value[index]) for part in made.time},
        {part.name: float(part.value[index]) for part in made.memory},
        {axis: float(sent[index]) for axis, sent in made.traffic.items()},
        False,
        found.take(np.array([index])),
        tuple(_of_one(part, index) for part in made.time),
        tuple(_of_one(part, index) for part in made.memory),
    )


def _of_one(part: CostPart, index: int) -> CostPart:
    symbols = {
        name: value[index : index + 1] if isinstance(value, np.ndarray) and value.ndim else value
        for name, value in part.symbols.items()
    }
    return replace(part, value=part.value[index : index + 1], symbols=symbols)


# ---- event by event ------------------------------------------------------------------------------


def simulate_rows(question: PlanQuery, rows: Sequence[RankedLayout]) -> list[RankedLayout]:
    """These, pipelines with the time that a simulation gives, as far as ACTIONS reach."""
    pipelines = _Pipelines()
    return [pipelines.run(question, row) if row.schedule else row for row in rows]


class _Pipelines:
    """Simulations of pipelines, each once: layouts that differ in their data axes mostly have the
    same."""

    def __init__(self) -> None:
        self.left, self._known = ACTIONS, dict[tuple, float]()

    def run(self, question: PlanQuery, row: RankedLayout) -> RankedLayout:
        """What no closed form of a bubble knows: the first and the last stage have other work,
        messages take time."""
        key = self._key(row)
        if key not in self._known:
            if self.left <= 0:
                return row
            self._known[key] = self._makespan(question, row)
        return _with(row, self._known[key])

    def _key(self, row: RankedLayout) -> tuple:
        """All that a stage's work depends on: data axes, where experts are spread over them, or
        each microbatch waits for what they share. What follows the pipeline is no part of it."""
        c = row.chosen.choices
        waits = c.experts[0] > 1 or c.offload[0] or (c.state_ranks[0] > 1 and c.zero[0] > 1)
        sizes = tuple(
            int(c.sizes[axis][0])
            for axis in AXES
            if waits or axis not in (REPLICA_AXIS, *STATE_AXES)
        )
        zero = int(c.zero[0]) if waits else 0
        others = int(c.experts[0]), bool(c.sequence[0]), bool(c.gather[0]), bool(c.offload[0])
        return (
            row.schedule,
            tuple(row.options.items()),
            row.accumulate,
            row.recompute,
            sizes,
            zero,
            others,
        )

    def _makespan(self, question: PlanQuery, row: RankedLayout) -> float:
        """Seconds of the pipeline. Of many microbatches a few are run: each of the others takes as
        long as the busiest rank works on it."""
        q, c, ranks = question, row.chosen.choices, int(row.chosen.choices.stage_ranks[0])
        few = min(row.accumulate, 2 * ranks + row.accumulate % ranks)
        cluster = q.cluster.model_copy(update={"devices": int(c.world[0])})
        fewer = replace(c, accumulate=np.array([few]))
        setup = Scenario(row.layout, q.work, fewer, cluster, q.era, q.practice, 1, q.sync)
        made, step = setup.schedule, setup.step()
        self.left -= sum(map(len, made.order))
        busy = [0.0] * ranks
        fields = (
            step.costs.each(name, made.stages) for name in ("forward_s", "backward_s", "weight_s")
        )
        for place, *seconds in zip(made.placement, *fields):
            busy[place] += sum(seconds)
        return simulate(made, step.costs).makespan_s + (row.accumulate - few) * max(busy)


REPLAYED = (TimePart.BUBBLE, TimePart.MESSAGES)  # what a simulation of the pipeline replaces


def _with(row: RankedLayout, makespan: float) -> RankedLayout:
    """The row with a pipeline that takes so long. Messages are in the bubble then."""
    after = {part.name for part in row.time_parts if follows_pipeline(part)}
    kept = {name: value for name, value in row.time.items() if name not in REPLAYED}
    kept[TimePart.BUBBLE] = makespan - sum(
        value for name, value in kept.items() if name not in after
    )
    step = sum(kept.values())
    change = row.step_s / step
    return replace(
        row,
        step_s=step,
        tokens_per_s=row.tokens_per_s * change,
        mfu=row.mfu * change,
        time=kept,
        simulated=True,
    )
