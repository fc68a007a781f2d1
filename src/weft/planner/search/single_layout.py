"""One given layout, priced and explained without a search, and what would make it fit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from weft.core import Layout, LayoutError, PipelineConfig, Refusal, RunConfig
from weft.pipeline import schedule_of
from weft.train import with_layout

from ..cost.layout_batch import AXES
from .candidates import Candidates, layout_variants, refusal, schedule_variants
from .constraints import SCHEDULES, SPREADING
from .explain import describe_row, excess_text
from .feasibility import FeasibilityChecker
from .layout_pattern import LayoutPattern
from .no_fit import no_candidates
from .query import PlanQuery
from .query_from_run import layout_of_run, plain_layout
from .ranking import RankedLayout, Ranking, price, rows_of, simulate_rows
from .report import PlanReport

TRIED = 8  # ways to run one layout that are simulated, and that weft's planner is asked about


def parse_whole_layout(layout: str) -> LayoutPattern:
    """What --explain names. Raises LayoutError."""
    pattern = LayoutPattern.parse(layout, "--explain")
    if not pattern.exact:
        raise LayoutError(
            "--explain", layout, "is not a complete layout", "write one as in fsdp8.tp8"
        )
    return pattern


def rank_whole(
    checker: FeasibilityChecker, question: PlanQuery, patterns: Sequence[LayoutPattern]
) -> Ranking:
    """Layouts that are given whole, with the microbatches, recomputation and schedule of the run
    file. Those that weft would not lay so are left out, among `checker.refused`. Raises Refusal,
    also where none is left."""
    rows: list[RankedLayout] = []
    for pattern in patterns:
        _check(question, pattern, checker, "--layout")
        one = _written_layout(checker.run, checker.bare, pattern)
        (row,) = simulate_rows(question, rows_of(question, one))
        if checker.first((row,)) is not None:
            rows.append(row)
    if not rows:
        raise checker.refused[0][1]
    given = tuple(rows) if len(patterns) > 1 else ()
    rows.sort(key=lambda row: (max(row.over_bytes, 0), row.step_s))
    return Ranking(
        tuple(rows),
        rows[0].fits,
        len(patterns),
        sum(row.simulated for row in rows),
        max(Layout.parse(row.layout).world for row in rows),
        exhaustive=True,
        compared=given,
    )


def _written_layout(run: RunConfig, model: nn.Module, pattern: LayoutPattern) -> Candidates:
    """A whole layout, with the rest as the run file has it."""
    recompute = run.train.recompute
    layout = plain_layout(pattern.layout)
    spread = sum(1 << bit for bit, axis in enumerate(SPREADING) if layout.spreads_experts(axis))
    laid = layout_of_run(with_layout(run, pattern.layout), model)
    named = recompute if isinstance(recompute, tuple) else ()
    return Candidates(laid, np.array([spread]), recomputed=named)


def _schedule(one: Candidates) -> tuple[str, int]:
    """Its schedule, and stages of a rank."""
    return one.choices.schedules[0], int(one.choices.chunks[0])


def _check(
    question: PlanQuery, pattern: LayoutPattern, checker: FeasibilityChecker, field: str
) -> None:
    """A whole layout has a device for each rank, and weft knows it as it is written. Raises
    Refusal."""
    world, devices = pattern.layout.world, question.cluster.devices
    if world > devices:
        problem = f"has {world} ranks, and {question.cluster} has {devices} devices"
        raise LayoutError(field, pattern.text, problem, "use a smaller layout, or a larger cluster")
    if refusal(dict.fromkeys(AXES, 1) | dict(plain_layout(pattern.layout).sizes), question):
        raise no_candidates(question, pattern, field)
    try:
        schedule_of(pattern.layout)
        checker.check_layout(pattern.layout)
    except Refusal as refused:
        if refused.field != "layout":
            raise
        raise LayoutError(field, pattern.text, refused.problem, refused.fix) from None


def other_ways(question: PlanQuery, row: RankedLayout, checker: FeasibilityChecker) -> list[str]:
    """How a layout that does not fit would, in the schedule that it has; or by how much it never
    does."""
    one = row.chosen
    best = _best_way(question, one, [_schedule(one)], checker)
    if best is None:
        return []
    if best.fits:
        return [f"it would fit as {describe_row(best)}"]
    return [
        "no number of microbatches and no recomputation makes it fit: the nearest,"
        f" {describe_row(best)}, {excess_text(best)}"
    ]


def explain_layout(
    report: PlanReport, pattern: LayoutPattern, checker: FeasibilityChecker, top: int
) -> RankedLayout:
    """A whole layout as the report shows it, or else the best way to run it. Raises Refusal."""
    question = report.question
    _check(question, pattern, checker, "--explain")
    named = schedule_of(pattern.layout)
    run = checker.run if named else checker.run.model_copy(update={"pipeline": PipelineConfig()})
    one = _written_layout(run, checker.bare, pattern)
    shown = [*report.rows()[:top], *(each.row for each in report.losers if each.row is not None)]
    layout = str(one.layout(0))
    known = (row for row in shown if row.layout == layout and named in (None, row.schedule))
    if (row := next(known, None)) is not None:
        return row
    searched = named is None or named in SCHEDULES
    schedules = schedule_variants([named] if named else SCHEDULES) if searched else [_schedule(one)]
    row = _best_way(question, one, schedules, checker)
    if row is None:
        chunks = {"chunks": one.choices.chunks[0]}
        raise (
            checker.refused[0][1]
            if checker.refused
            else no_candidates(question, pattern, "--explain", chunks)
        )
    return row


def _best_way(
    question: PlanQuery,
    one: Candidates,
    schedules: Sequence[tuple[str, int]],
    checker: FeasibilityChecker,
) -> RankedLayout | None:
    """The fastest way to run a layout with one of these schedules that fits, or else the nearest to
    it, of those that weft would run; none, if there is none."""
    tried = layout_variants(one, question, schedules)
    prices = price(question, tried)
    order = np.lexsort((prices.step_s, np.maximum(prices.over_bytes, 0)))[:TRIED]
    rows = simulate_rows(question, rows_of(question, tried.take(order)))
    return checker.first(tuple(sorted(rows, key=lambda row: (max(row.over_bytes, 0), row.step_s))))
