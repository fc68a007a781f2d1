"""Every schedule, under every layout, with every model of tests/staged.py, held to one device in
float64.

    python benchmarks/parity/run.py  # all; about 40 minutes on 2 cores
    python benchmarks/parity/run.py --models t5 --schedules zb-v 1f1b --layouts pp2.fsdp2

Writes results/parity.json (runs that were made before and are not made now stay) and the table in
README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the models, and their data

from cases import Subject  # noqa: E402

import weft  # noqa: E402
from tests.staged import STAGED  # noqa: E402
from weft.core.errors import Refusal, WorkerDied  # noqa: E402
from weft.launch.local_workers import Pool  # noqa: E402
from weft.pipeline import schedules  # noqa: E402
from weft.verification.case import Case  # noqa: E402
from weft.verification.compare import check_layout  # noqa: E402
from weft.verification.delayed_reference import run_delayed  # noqa: E402
from weft.verification.difference import TOLERANCE  # noqa: E402
from weft.verification.reference import Reference, run_reference  # noqa: E402

RESULTS, README = HERE / "results" / "parity.json", HERE / "README.md"
LAYOUTS = [f"pp{ranks}{beside}" for ranks in (2, 4) for beside in ("", ".dp2", ".fsdp2", ".tp2")]
STEPS = 2
TIMEOUT_S = 300.0

PREPARING = Lock()  # models and batches are drawn from torch's one generator

Builder = Callable[..., Any]


def schedule_builders() -> dict[str, Builder]:
    """All of weft's, PipeDream once for each way to keep weights."""
    found: dict[str, Builder] = {
        name: partial(schedules.make_schedule, name) for name in schedules.registry()
    }
    for versions in ("stash", "vertical", "2bw"):
        found[f"pipedream-{versions}"] = partial(found["pipedream"], versions=versions)
    del found["pipedream"]
    return found


SCHEDULES = schedule_builders()


@dataclass(frozen=True)
class Run:
    """One cell of the grid, and what came of it: `error`, the worst of all relative errors; or why
    it was `refused`; or what was wrong with it (`failure`)."""

    model: str
    schedule: str
    layout: str
    error: float | None = None
    seconds: float = 0.0
    refused: str | None = None
    failure: str | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.schedule, self.layout

    @property
    def command(self) -> str:
        options = f"--models {self.model} --schedules {self.schedule} --layouts {self.layout}"
        return f"python benchmarks/parity/run.py {options}"


# ---- one run -------------------------------------------------------------------------------------


def made(run: Run, pool: Pool) -> Run:
    """The run with what came of it."""
    begin = time.perf_counter()
    try:
        case, held_to = prepared(run)
    except Refusal as refusal:
        return replace(run, refused=refusal.problem)
    world = weft.Layout.parse(run.layout).world
    try:
        result = pool.run(check_layout, case, run.layout, held_to, world=world, timeout=TIMEOUT_S)[
            0
        ]
    except (Refusal, WorkerDied) as problem:
        return replace(run, failure=str(problem), seconds=time.perf_counter() - begin)
    error = max(result.loss_rel_err, result.grad_rel_err, result.param_rel_err)
    says = None if result.passed else result.first or result.problem or result.stray or result.worst
    return replace(
        run,
        error=error if math.isfinite(error) else None,
        failure=says,
        seconds=time.perf_counter() - begin,
    )


def prepared(run: Run) -> tuple[Case, Reference]:
    """The case, planned, and what it is held to. Raises Refusal: what cannot be laid starts no
    process."""
    case = subject_of(run.model, run.schedule).case()
    with PREPARING:
        plan = case.plan(case.build(), run.layout)
        late = bool(plan.schedule.versions)
        held_to = (
            delayed(run.model, run.schedule, plan.layout.size("pp")) if late else alone(run.model)
        )
    return replace(case, plan=partial(given, plan)), held_to


def subject_of(model: str, name: str) -> Subject:
    return replace(STAGED[model], plan=(*STAGED[model].plan, ("schedule", SCHEDULES[name])))


def given(plan: weft.Plan, model: nn.Module, layout: str) -> weft.Plan:
    return plan


@cache
def alone(model: str) -> Reference:
    """The model on one device."""
    return run_reference(STAGED[model].case(), STEPS)


@cache
def delayed(model: str, name: str, ranks: int) -> Reference:
    """The same delayed weights on one device, for every layout of so many stages: each makes its
    own plan."""
    return replace(run_delayed(subject_of(model, name).case(), f"pp{ranks}", STEPS), plan=None)


def all_of(runs: list[Run], jobs: int) -> Iterator[Run]:
    """The runs as they end, `jobs` at a time, each in a pool of eight processes."""
    with ExitStack() as stack:
        pools: SimpleQueue[Pool] = SimpleQueue()
        for _ in range(jobs):
            pools.put(stack.enter_context(Pool(8)))

        def one(run: Run) -> Run:
            pool = pools.get()
            try:
                return made(run, pool)
            finally:
                pools.put(pool)

        executor = ThreadPoolExecutor(jobs)
        stack.callback(executor.shutdown, cancel_futures=True)
        for future in as_completed([executor.submit(one, run) for run in runs]):
            yield future.result()


# ---- results and README --------------------------------------------------------------------------


def table(runs: list[Run]) -> str:
    """Models by schedules in Markdown; what failed, with its command; what was refused, and why."""
    names = [name for name in SCHEDULES if any(run.schedule == name for run in runs)]
    lines = ["| |" + "".join(f" {name} |" for name in names), "| --- |" + " ---: |" * len(names)]
    for model in dict.fromkeys(run.model for run in runs):
        cells = [
            cell([r for r in runs if (r.model, r.schedule) == (model, name)]) for name in names
        ]
        lines.append(f"| {model} |" + "".join(f" {text} |" for text in cells))
    ran = [run for run in runs if run.refused is None]
    failed = [run for run in ran if run.failure is not None]
    lines += [
        "",
        f"{len(ran) - len(failed)} of {len(ran)} runs equal one device below {TOLERANCE:g}.",
    ]
    if failed:
        lines += ["", "Failed:", ""]
        lines += [f"- `{run.command}`: {(run.failure or '').splitlines()[-1]}" for run in failed]
    reasons: dict[str, Counter[str]] = {}
    for run in runs:
        if run.refused is not None:
            reasons.setdefault(run.refused, Counter())[run.model] += 1
    lines += ["", f"{len(runs) - len(ran)} were refused before any process started:", ""]
    lines += [
        f"- {why}: {', '.join(f'{m} ({n})' for m, n in found.items())}"
        for why, found in reasons.items()
    ]
    return "\n".join(lines)


def cell(runs: list[Run]) -> str:
    """The worst error over the layouts (how many ran)."""
    ran = [run for run in runs if run.refused is None]
    if not ran:
        return "-"
    wrong = " **failed**" * any(run.failure is not None for run in ran)
    return f"{max((run.error or 0.0) for run in ran):.0e} ({len(ran)}){wrong}"


def write(runs: list[Run], command: str) -> None:
    """results/parity.json, with the runs that it held before and that are not made anew, and
    README.md."""
    if RESULTS.exists():
        before = [Run(**kept) for kept in json.loads(RESULTS.read_text())["runs"]]
        runs = list({run.key: run for run in (*before, *runs)}.values())
    axes = [list(STAGED), list(SCHEDULES), LAYOUTS]
    runs = sorted(
        runs, key=lambda run: [order.index(name) for order, name in zip(axes, run.key, strict=True)]
    )
    environment = {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    found = {
        "environment": environment,
        "command": command,
        "steps": STEPS,
        "runs": [asdict(run) for run in runs],
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    begin, end = "<!-- results: written by run.py -->", "<!-- end of results -->"
    head, rest = README.read_text().split(begin)
    README.write_text(f"{head}{begin}\n\n{table(runs)}\n\n{end}{rest.split(end)[1]}")


@contextmanager
def progress(total: int) -> Iterator[Callable[[Run], None]]:
    columns = [
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    ]
    with Progress(*columns) as bar:
        task = bar.add_task("", total=total)

        def done(run: Run) -> None:
            bar.update(task, advance=1, description=" ".join(run.key))
            if run.failure is not None:
                bar.console.print(
                    f"{run.command}\n{run.failure}", markup=False, highlight=False, soft_wrap=True
                )

        yield done


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=STAGED, default=list(STAGED), metavar="MODEL"
    )
    parser.add_argument(
        "--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES), metavar="SCHEDULE"
    )
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS, metavar="LAYOUT")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    grid = [
        Run(*key)
        for key in (
            (m, s, y) for m in options.models for s in options.schedules for y in options.layouts
        )
    ]
    runs: list[Run] = []
    command = f"python benchmarks/parity/run.py {' '.join(sys.argv[1:])}".strip()
    try:
        with progress(len(grid)) as done:
            for run in all_of(grid, options.jobs):
                runs.append(run)
                done(run)
    finally:  # what was made stays, where the rest is stopped
        write(runs, command)
    return int(any(run.failure is not None for run in runs))


if __name__ == "__main__":
    sys.exit(main())
