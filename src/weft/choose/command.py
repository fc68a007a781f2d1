"""`weft plan RUN.toml`: the search, what it says, and the run file that it writes."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from .. import build, schedule, stages, tables
from ..config import Pipeline, Run
from ..cost.choices import AXES
from ..cost.hardware import GIB, Cluster
from ..cost.work import Work
from ..errors import ConfigError, LayoutError
from ..layout import Layout
from .candidates import Candidates, candidates, divisors, left_out, refusal, variants, ways
from .explain import described, over
from .legal import Judge, chosen
from .obvious import losers
from .patterns import ANY, Pattern
from .posed import choice, plain, traced
from .practice_of import practice
from .question import Question
from .ranking import Progress, Ranked, Row, price, priced_best, rank, rows_of, simulated
from .report import Report
from .rules import SCHEDULES, SPREADING

LONG = 200_000  # choices from which on a search shows how far it is
OFFLOAD = ("fsdp", "offload")
TRIED = 8  # ways to run one layout that are simulated, and that weft's planner is asked about
MORE = (2, 4, 8, 16, 32, 64)  # times as many devices, where none fits


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
    asked = None if explain is None else whole(explain)
    bare, held = build.skeleton(run), build.dataset(run)
    question = question_of(run, where, named, traced(run, bare, held, where.hardware.kind))
    judge = Judge(run, bare, held)
    began = time.perf_counter()
    with _bar() as progress:
        found = _alone(judge, question, pattern) if pattern.exact else rank(question, pattern, wide, progress)
    if not found.rows:
        raise _nothing(question, pattern)
    if not found.fits and not pattern.exact:
        raise _too_large(question, pattern, found.rows[0])
    best = judge.first(found.rows)
    if best is None:
        raise judge.refused[0][1]
    others = [] if pattern.exact else losers(question, found.devices, best, found.rows)
    out = [] if pattern.exact else left_out(question, found.devices, pattern)
    took = time.perf_counter() - began
    said = notes(question, pattern, found, Judge(run, bare, held))
    report = Report(question, found, best, others, judge.refused, out, named, took, said)
    if asked is not None:
        report = replace(report, explained=_explained(report, asked, Judge(run, bare, held), top))
    return report, chosen(run, best)


def notes(question: Question, pattern: Pattern, found: Ranked, judge: Judge) -> list[str]:
    """What a layout that does not fit would need; that a search has its own schedules."""
    if not pattern.exact:
        name = judge.run.pipeline.schedule
        own = name not in schedule.folder() and any(row.schedule for row in found.rows)
        return [f"{name} is not searched: a whole --layout is priced with it"] if own else []
    one = _written(judge.run, pattern)
    other = None if found.fits else _best_way(question, one, [_schedule(one)], judge)
    if other is None:
        return []
    if other.fits:
        return [f"it would fit as {described(other)}"]
    return [f"it fits with no microbatches and no recomputation: the nearest, {described(other)}, {over(other)}"]


def _best_way(question: Question, one: Candidates, schedules: Sequence[tuple[str, int]], judge: Judge) -> Row | None:
    """The fastest way to run a layout with one of these schedules that fits, or else the nearest to it, of those that
    weft would run; none, if there is none."""
    tried = ways(one, question, schedules)
    prices = price(question, tried)
    order = np.lexsort((prices.step_s, np.maximum(prices.over_bytes, 0)))[:TRIED]
    rows = simulated(question, rows_of(question, tried.take(order)))
    return judge.first(tuple(sorted(rows, key=lambda row: (max(row.over_bytes, 0), row.step_s))))


def question_of(run: Run, where: Cluster, era: str, work: Work | None = None) -> Question:
    """How to lay a run over a cluster. `work`: its model's, where that is known. Raises Refusal."""
    work = work or traced(run, build.skeleton(run), build.dataset(run), where.hardware.kind)
    return Question(work, run.train.batch, where, where.hardware.era(era), practice(run), build.synchronizer(run))


def _alone(judge: Judge, question: Question, pattern: Pattern) -> Ranked:
    """A layout that is given whole, with the microbatches, recomputation and schedule of the run file."""
    _check_room(question, "--layout", pattern)
    if (problem := judge.written(pattern.text)) is not None:
        raise LayoutError("--layout", pattern.text, problem.problem, problem.fix)
    one = _written(judge.run, pattern)
    rows = simulated(question, rows_of(question, one))
    world = int(one.choices.world[0])
    return Ranked(tuple(rows), rows[0].fits, 1, sum(row.simulated for row in rows), world, True)


def _written(run: Run, pattern: Pattern) -> Candidates:
    """A whole layout, with the rest as the run file has it."""
    layout = plain(pattern.text)
    spread = sum(1 << bit for bit, axis in enumerate(SPREADING) if "ep" in layout.option(axis))
    return Candidates(choice(build.with_layout(run, pattern.text)), np.array([spread]))


def _schedule(one: Candidates) -> tuple[str, int]:
    """Its schedule, and stages of a rank."""
    return one.choices.schedules[0], int(one.choices.chunks[0])


def _check_room(question: Question, field: str, pattern: Pattern) -> None:
    """A whole layout has a device for each rank. Raises LayoutError."""
    world, devices = Layout.parse(pattern.text).world, question.cluster.devices
    if world > devices:
        problem = f"has {world} ranks, and {question.cluster} {devices} devices"
        raise LayoutError(field, pattern.text, problem, "use a smaller layout, or a larger cluster")


def whole(layout: str) -> Pattern:
    """What --explain names. Raises LayoutError."""
    pattern = Pattern.parse(layout, "--explain")
    if not pattern.exact:
        raise LayoutError("--explain", layout, "is no whole layout", "write one as in fsdp8.tp8")
    return pattern


def _explained(report: Report, pattern: Pattern, judge: Judge, top: int) -> Row:
    """A whole layout as the report shows it, or else the best way to run it. Raises Refusal."""
    question, named = report.question, stages.named(Layout.parse(pattern.text))
    _check_room(question, "--explain", pattern)
    if refusal(dict.fromkeys(AXES, 1) | dict(pattern.sizes), question):
        raise _nothing(question, pattern, "--explain")
    if (problem := judge.written(pattern.text)) is not None:
        raise LayoutError("--explain", pattern.text, problem.problem, problem.fix)
    run = judge.run if named else judge.run.model_copy(update={"pipeline": Pipeline()})
    one = _written(run, pattern)
    shown = [*report.rows()[:top], *(each.row for each in report.losers if each.row is not None)]
    layout = str(one.layout(0))
    known = (row for row in shown if row.layout == layout and named in (None, row.schedule))
    if (row := next(known, None)) is not None:
        return row
    searched = named is None or named in SCHEDULES
    schedules = variants([named] if named else SCHEDULES) if searched else [_schedule(one)]
    row = _best_way(question, one, schedules, judge)
    if row is None:
        judge.first(tuple(rows_of(question, one)))
        raise judge.refused[0][1] if judge.refused else _nothing(question, pattern, "--explain")
    return row


def _on(question: Question, devices: int) -> Question:
    """The same on so many devices. Raises ConfigError."""
    return replace(question, cluster=Cluster.of(question.cluster.hardware, devices))


def write(run: Run, out: Path) -> None:
    """A run file that `weft train` takes. Raises ConfigError."""
    folder = os.path.relpath(run.folder, out.resolve().parent)
    try:
        out.write_text(tables.dump(run.model_copy(update={"folder": folder})), encoding="utf-8")
    except OSError as error:
        raise ConfigError("--out", str(out), f"cannot be written ({error})", "name another file") from None


# ---- refusals --------------------------------------------------------------------------------------------------------


def _nothing(question: Question, pattern: Pattern, field: str = "--layout") -> LayoutError:
    """The rules allow no choice of a pattern."""
    sizes = {axis: size for axis, size in pattern.sizes if size is not None}
    devices = question.cluster.devices
    if not pattern.exact and devices % math.prod(sizes.values()):
        problem = f"{math.prod(sizes.values())} ranks do not divide {devices} devices"
        return LayoutError(field, pattern.text, problem, "use sizes whose product divides the devices")
    problem = refusal(dict.fromkeys(AXES, 1) | sizes, question) or "no layout of it keeps to the rules"
    allowed = [
        f"{axis}{size}" for axis in sizes for size in divisors(devices)
        if size > 1 and not refusal(dict.fromkeys(AXES, 1) | {axis: size}, question)
    ]  # fmt: skip
    return LayoutError(field, pattern.text, problem, f"sizes that work: {', '.join(allowed) or 'none'}")


def _too_large(question: Question, pattern: Pattern, nearest: Row) -> ConfigError:
    """Nothing fits: by how much the best misses, and what would help."""
    device, gib = question.cluster.hardware.device, nearest.held_bytes / GIB
    problem = (
        f"no layout fits: {described(nearest)}, the nearest, takes {gib:,.1f} GiB of {device.memory_gib:g}, "
        f"{nearest.over_bytes / GIB:,.1f} too many"
    )
    helps = []
    if not pattern.given("fsdp") and (pattern.more or "fsdp" in dict(pattern.sizes)):
        away = replace(pattern, sizes=_with_fsdp(pattern), options=(*pattern.options, OFFLOAD))
        row = priced_best(question, candidates(question, question.cluster.devices, away))
        if row is not None and row.fits:
            helps.append(f'--layout "{row.layout}.*" fits')
    most = question.cluster.hardware.tiers[-1].devices or math.inf
    for times in MORE:
        if times * question.cluster.devices > most:
            break
        larger = _on(question, times * question.cluster.devices)
        row = priced_best(larger, candidates(larger, larger.cluster.devices, pattern))
        if row is not None and row.fits:
            helps.append(f"{larger.cluster.devices} devices would do, with {row.layout}")
            break
    fix = "; ".join(helps) or "use devices with more memory, shorter samples, or a smaller model"
    return ConfigError("--cluster", str(question.cluster), problem, fix)


def _with_fsdp(pattern: Pattern) -> tuple[tuple[str, int | None], ...]:
    return pattern.sizes if "fsdp" in dict(pattern.sizes) else (*pattern.sizes, ("fsdp", None))


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
