"""`weft plan RUN.toml`: the search, what it says, and the run file that it writes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from .. import build, schedule, tables
from ..config import Run
from ..cost.hardware import Cluster
from ..cost.work import Work
from ..errors import ConfigError, nearest
from . import whole
from .candidates import left_out
from .legal import Judge, chosen
from .obvious import losers
from .patterns import ANY, Pattern
from .posed import traced
from .practice_of import practice
from .question import Question
from .ranking import Progress, Ranked, rank
from .refusals import nothing, too_large
from .report import Report
from .rules import SCHEDULES

SEARCHED = set(SCHEDULES) - {"naive"}
LONG = 200_000  # choices from which on a search shows how far it is


def era_of(cluster: Cluster, name: str | None) -> str:
    """The software that weft is: what torch runs eagerly, if the sheet knows of it. Raises ConfigError."""
    eras = cluster.hardware.eras
    found = name or ("eager" if "eager" in eras else next(iter(eras)))
    cluster.hardware.era(found)
    return found


def limited(cluster: Cluster, memory_gib: float | None) -> Cluster:
    """The cluster with devices of at most so much memory. Raises ConfigError."""
    if memory_gib is None:
        return cluster
    device = cluster.hardware.device
    if not 0 < memory_gib <= device.memory_gib:
        fix = f"give more than 0 and at most {device.memory_gib:g} GiB"
        raise ConfigError("--max-memory", memory_gib, f"is no part of the memory of {cluster.hardware.name}", fix)
    small = device.model_copy(update={"memory_gib": memory_gib})
    return cluster.model_copy(update={"hardware": cluster.hardware.model_copy(update={"device": small})})


def plan(
    run: Run,
    cluster: str,
    layout: str | None,
    era: str | None,
    memory_gib: float | None,
    wide: bool,
    explain: str | None = None,
    top: int = 10,
) -> tuple[Report, Run]:
    """What was found, and the run as it is best laid. `explain`: a whole layout that is looked at beside,
    as it is among the `top` or the obvious ones, if it is. Raises Refusal."""
    if run.workers:
        raise ConfigError("workers", list(run.workers), "has no layout to choose", "leave [workers] out")
    where = limited(Cluster.parse(cluster), memory_gib)
    named = era_of(where, era)
    pattern = ANY if layout is None else Pattern.parse(layout)
    asked = None if explain is None else whole.parsed(explain)
    hold_schedule(run)
    bare, held = build.skeleton(run), build.dataset(run)
    question = question_of(run, where, named, traced(run, bare, held, where.hardware.kind))
    judge = Judge(run, bare, held)
    began = time.perf_counter()
    with _bar() as progress:
        found = whole.alone(judge, question, pattern) if pattern.exact else rank(question, pattern, wide, progress)
    if not found.rows:
        raise nothing(question, pattern)
    if not found.fits and not pattern.exact:
        raise too_large(question, pattern, found, memory_gib)
    best = judge.first(found.rows)
    if best is None:
        raise judge.refused[0][1]
    others = [] if pattern.exact else losers(question, found.devices, best, found.rows)
    out = [] if pattern.exact else left_out(question, found.devices, pattern)
    took = time.perf_counter() - began
    said = notes(question, pattern, found, Judge(run, bare, held))
    report = Report(question, found, best, others, judge.refused, out, named, took, said)
    if asked is not None:
        report = replace(report, explained=whole.explained(report, asked, Judge(run, bare, held), top))
    return report, chosen(run, best)


def hold_schedule(run: Run) -> None:
    """Raises ConfigError for a schedule that is none."""
    name, known = run.pipeline.schedule, schedule.folder()
    if ":" not in name and name not in known:
        raise ConfigError("pipeline.schedule", name, "there is no such schedule", nearest(name, known))


def notes(question: Question, pattern: Pattern, found: Ranked, judge: Judge) -> list[str]:
    """What a layout that does not fit would need; that a search has its own schedules."""
    if not pattern.exact:
        name = judge.run.pipeline.schedule
        own = name not in SEARCHED and not pattern.given("pp") and any(row.schedule for row in found.rows)
        return [f"{name} is not searched: a whole --layout is priced with it"] if own else []
    said = [] if found.fits else whole.otherwise(question, pattern, judge)
    if found.rows[0].schedule and not isinstance(judge.run.pipeline.cut, str):
        said.append("pipeline.cut names where stages begin: they are priced as if they were even")
    return said


def question_of(run: Run, where: Cluster, era: str, work: Work | None = None) -> Question:
    """How to lay a run over a cluster. `work`: its model's, where that is known. Raises Refusal."""
    work = work or traced(run, build.skeleton(run), build.dataset(run), where.hardware.kind)
    return Question(work, run.train.batch, where, where.hardware.era(era), practice(run), build.synchronizer(run))


def write(run: Run, out: Path) -> None:
    """A run file that `weft train` takes. Raises ConfigError."""
    folder = os.path.relpath(run.folder, out.resolve().parent)
    try:
        out.write_text(tables.dump(run.model_copy(update={"folder": folder})), encoding="utf-8")
    except OSError as error:
        raise ConfigError("--out", str(out), f"cannot be written ({error})", "name another file") from None


# ---- progress --------------------------------------------------------------------------------------------------------


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
