"""`weft plan RUN.toml`: the search, its report, and the run file of the best layout."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn

from weft.core import (
    STAGE_AXIS,
    ConfigError,
    LayoutError,
    RunConfig,
    dump_toml,
    nearest,
)
from weft.pipeline import schedules
from weft.train import build_dataset, build_skeleton, build_sync

from .cost.hardware import Cluster
from .cost.model_work import ModelWork
from .measured_constants import measured_constants
from .search import single_layout
from .search.baselines import baselines
from .search.candidates import find_left_out
from .search.constraints import SCHEDULES
from .search.feasibility import FeasibilityChecker, run_with_row
from .search.layout_pattern import ANY, LayoutPattern
from .search.no_fit import no_candidates, nothing_fits
from .search.query import PlanQuery
from .search.query_from_run import era_of, work_of_run
from .search.ranking import Progress, Ranking, rank
from .search.report import PlanReport
from .search.run_precision import run_precision

SEARCHED = {name for name in SCHEDULES if schedules.is_searched(name)}
LONG = 200_000  # choices from which on a search shows how far it is


def limit_memory(cluster: Cluster, memory_gib: float | None) -> Cluster:
    """The cluster with devices of at most so much memory. Raises ConfigError."""
    if memory_gib is None:
        return cluster
    device = cluster.hardware.device
    if not 0 < memory_gib <= device.memory_gib:
        fix = f"give more than 0 and at most {device.memory_gib:g} GiB"
        raise ConfigError(
            "--max-memory",
            memory_gib,
            f"is not between 0 and the memory of {cluster.hardware.name}",
            fix,
        )
    small = device.model_copy(update={"memory_gib": memory_gib})
    return cluster.model_copy(
        update={"hardware": cluster.hardware.model_copy(update={"device": small})}
    )


def plan_for_cluster(
    run: RunConfig,
    cluster: str,
    layouts: Sequence[str],
    era: str | None,
    memory_gib: float | None,
    exhaustive: bool,
    explain: str | None = None,
    top: int = 10,
    measured: Sequence[str | Path] = (),
    kept: bool = True,
) -> tuple[PlanReport, RunConfig]:
    """Search the layouts of a run on a cluster.

    Args:
        run: the run.
        cluster: hardware sheet and number of devices, as in h100x64.
        layouts: what is fixed, as in tp8.*; or whole layouts, which are priced as they are; none:
            nothing is fixed.
        era: the software to price; default: as the run has it.
        memory_gib: use no more of a device's memory.
        exhaustive: also search unusual layouts.
        explain: a whole layout to explain.
        top: how many layouts the report shows.
        measured: metrics.jsonl of runs on such devices, or CSV files with the columns layout and
            step_s, whose steps move the constants of the estimates.
        kept: also use runs that weft train has noted on this machine, if it is of the cluster's
            kind.

    Returns:
        The report, and the run with its best layout.

    Raises:
        Refusal: nothing can be searched, or nothing fits.
    """
    if run.workers:
        raise ConfigError(
            "workers",
            list(run.workers),
            "run whole modules, so there is no layout to choose",
            "leave [workers] out",
        )
    where = limit_memory(Cluster.parse(cluster), memory_gib)
    named = era_of(where, era, run)
    patterns = parse_patterns(layouts)
    pattern, whole = patterns[0], patterns[0].exact
    asked = None if explain is None else single_layout.parse_whole_layout(explain)
    check_schedule(run)
    bare, held = build_skeleton(run), build_dataset(run)
    learned = measured_constants(run, where, named, measured, kept)
    question = replace(
        make_plan_query(run, where, named, work_of_run(run, bare, held, where.hardware.kind)),
        era=learned.era,
    )
    judge = FeasibilityChecker(run, bare, held)
    began = time.perf_counter()
    with _bar() as progress:
        found = (
            single_layout.rank_whole(judge, question, patterns)
            if whole
            else rank(question, pattern, exhaustive, progress)
        )
    if not found.rows:
        raise no_candidates(question, pattern)
    if not found.fits and not whole:
        raise nothing_fits(question, pattern, found, memory_gib)
    best = found.rows[0] if whole else judge.first(found.rows)
    if best is None:
        raise judge.refused[0][1]
    others = [] if whole else baselines(question, found.devices, best, found.rows)
    out = [] if whole else find_left_out(question, found.devices, pattern)
    took = time.perf_counter() - began
    said = plan_notes(question, pattern, found, FeasibilityChecker(run, bare, held))
    report = PlanReport(
        question,
        found,
        best,
        others,
        judge.refused,
        out,
        named,
        took,
        run.train.steps,
        learned.belief,
        [*learned.notes, *said],
    )
    if asked is not None:
        report = replace(
            report,
            explained=single_layout.explain_layout(
                report, asked, FeasibilityChecker(run, bare, held), top
            ),
        )
    return report, run_with_row(run, best)


def parse_patterns(layouts: Sequence[str]) -> list[LayoutPattern]:
    """What each --layout says: one pattern, or whole layouts. Raises LayoutError."""
    found = list(dict.fromkeys(LayoutPattern.parse(layout) for layout in layouts)) or [ANY]
    for one in found:
        if len(found) > 1 and not one.exact:
            problem = "is a pattern, and a search takes only one pattern"
            raise LayoutError(
                "--layout", one.text, problem, "give it alone, or give complete layouts"
            )
    return found


def check_schedule(run: RunConfig) -> None:
    """Raises ConfigError for a schedule that is none."""
    name, known = run.pipeline.schedule, schedules.builtin_schedules()
    if ":" not in name and name not in known:
        raise ConfigError(
            "pipeline.schedule", name, "there is no such schedule", nearest(name, known)
        )


def plan_notes(
    question: PlanQuery, pattern: LayoutPattern, found: Ranking, judge: FeasibilityChecker
) -> list[str]:
    """What a layout that does not fit would need; that a search has its own schedules."""
    if not pattern.exact:
        name = judge.run.pipeline.schedule
        own = (
            name not in SEARCHED
            and not pattern.given(STAGE_AXIS)
            and any(row.schedule for row in found.rows)
        )
        return (
            [f"the search leaves out {name}: give a complete --layout to estimate it"]
            if own
            else []
        )
    named = "" if len(found.rows) == 1 else "{}: "
    said = [
        named.format(row.layout) + way
        for row in found.rows
        if not row.fits
        for way in single_layout.other_ways(question, row, judge)
    ]
    if any(row.schedule for row in found.rows) and not isinstance(judge.run.pipeline.cut, str):
        said.append("pipeline.cut names where stages begin, but the estimate assumes even stages")
    return said


def make_plan_query(
    run: RunConfig, where: Cluster, era: str, work: ModelWork | None = None
) -> PlanQuery:
    """How to lay a run over a cluster. `work`: its model's, where that is known. Raises Refusal."""
    work = work or work_of_run(run, build_skeleton(run), build_dataset(run), where.hardware.kind)
    return PlanQuery(
        work, run.train.batch, where, where.hardware.era(era), run_precision(run), build_sync(run)
    )


def write_run_file(run: RunConfig, out: Path) -> None:
    """A run file that `weft train` takes. Raises ConfigError."""
    folder = os.path.relpath(run.folder, out.resolve().parent)
    try:
        out.write_text(dump_toml(run.model_copy(update={"folder": folder})), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "--out", str(out), f"cannot be written ({error})", "name another file"
        ) from None


# ---- progress ------------------------------------------------------------------------------------


@contextmanager
def _bar() -> Iterator[Progress]:
    """A bar on a terminal, of a search that is long."""
    console = Console(stderr=True)
    columns = (TextColumn("choices"), BarColumn(), MofNCompleteColumn())
    with Bar(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("choices", visible=False)

        def progress(done: int, of: int) -> None:
            bar.update(task, completed=done, total=of, visible=of >= LONG)

        yield progress
