"""What is predicted of this machine beside what it does: seconds of a step, memory and traffic of
two processes.

    python benchmarks/local/run.py [sheets] [runs]        both, if none is named

Each part writes results/PART.json; the tables in README.md are then written anew from both.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import parts  # noqa: E402
import runs  # noqa: E402
from torch import nn  # noqa: E402

from weft.launch import local_workers  # noqa: E402
from weft.planner.calibrate import measure as command  # noqa: E402
from weft.planner.calibrate.sheet import ERA  # noqa: E402
from weft.planner.cost import hardware  # noqa: E402
from weft.planner.cost.estimate import Estimate, estimate  # noqa: E402
from weft.planner.search.query_from_run import RunQuery, layout_of_run, query_from_run  # noqa: E402

SHEETS, RUNS = 3, 1  # rounds
TARGET = 0.15  # median error of a step's seconds


def calibrated(rounds: int) -> list[dict[str, Any]]:
    """Sheets, and what other programs had of the processors meanwhile."""
    found = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            path, seen, _ = command.calibrate(
                Path(folder) / "sheet.toml", lambda part: print(part, flush=True)
            )
            found.append({"others": seen.others, "sheet": path.read_text(encoding="utf-8")})
    return found


def measured(sizes: list[str], rounds: int) -> list[dict[str, Any]]:
    """In each round every case in new processes: what disturbs a while meets all alike. Of each
    case, the round in which other programs had least; those measured before, and kept, are one
    more."""
    kept = HERE / "results" / "runs.json"
    before = json.loads(kept.read_text())["runs"] if kept.exists() else []
    rows = {str(case_of(row)): row for row in before}
    for case in [case for _ in range(rounds) for case in runs.CASES if case.size in sizes]:
        new = runs.found(case, local_workers.run_workers(runs.steps, 2, case))
        rows[str(case)] = min(rows.get(str(case), new), new, key=lambda row: row["others"])
        print(f"{case}: {new['step_s']:.4f} s, others had {new['others']:.0%}", flush=True)
    return [rows[str(case)] for case in runs.CASES if str(case) in rows]


def case_of(row: dict[str, Any]) -> runs.Case:
    return runs.Case(*(row[field.name] for field in fields(runs.Case)))


@cache
def of(size: str) -> RunQuery:
    """The work of a model is the same on all layouts."""
    return query_from_run(next(case for case in runs.CASES if case.size == size).run())


def predicted(case: runs.Case, sheet: str) -> Estimate:
    made = hardware.parse_sheet(sheet, "sheet")
    here, laid = of(case.size), layout_of_run(case.run(), nn.Module())  # recompute names no module
    cluster = hardware.Cluster(hardware=made, devices=2)
    return estimate(here.work, laid, cluster, made.era(ERA), here.practice, here.sync)


def tables(results: parts.Results) -> tuple[list[str], bool]:
    """Predicted by the sheet of the round in which other programs had least, beside measured."""
    if not {"sheets", "runs"} <= set(results):
        return ["Not all parts have been measured."], False
    sheet = min(results["sheets"]["runs"], key=lambda one: one["others"])["sheet"]
    lines = [
        "| run | step, s | predicted, s | error | peak, MB | predicted, MB | error | sent, MB |"
        " predicted, MB |"
    ]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    times, memory, disturbed = [], [], []
    for row in results["runs"]["runs"]:
        case = case_of(row)
        one = predicted(case, sheet)
        step_s, peak = float(one.step_s[0]), float(one.process_bytes[0])
        sent = sum(row["sent"].values())
        told = sum(float(value[0]) for value in one.traffic.values())
        times.append(step_s / row["step_s"] - 1)
        memory.append(peak / row["memory_bytes"] - 1)
        disturbed.append(row["others"])
        lines.append(
            f"| {case} | {row['step_s']:.3f} | {step_s:.3f} | {times[-1]:+.0%} |"
            f" {row['memory_bytes'] / 1e6:.0f} | {peak / 1e6:.0f} | {memory[-1]:+.0%} |"
            f" {sent / 1e6:.2f} | {told / 1e6:.2f} |"
        )
    middle = statistics.median(map(abs, times))
    lines += ["", "| of all | median error | worst | at most |", "| --- | ---: | ---: | ---: |"]
    lines += [f"| step | {middle:.1%} | {max(map(abs, times)):.0%} | {TARGET:.0%} |"]
    lines += [
        f"| memory | {statistics.median(map(abs, memory)):.1%} | {max(map(abs, memory)):.0%} | |"
    ]
    lines += [
        "",
        f"Other programs had a median of {statistics.median(disturbed):.0%} of the processors.",
    ]
    return lines, middle <= TARGET


def main() -> int:
    names = {"sheets": None, "runs": None}
    parser = parts.parser(__doc__, names)
    parser.add_argument(
        "--rounds", type=int, help=f"{SHEETS} of calibrations and {RUNS} of runs, if left out"
    )
    parser.add_argument(
        "--size", choices=runs.SIZES, action="append", help="of models: all, if left out"
    )
    options = parser.parse_args()
    made = {
        "sheets": partial(calibrated, options.rounds or SHEETS),
        "runs": partial(measured, options.size or list(runs.SIZES), options.rounds or RUNS),
    }
    return parts.measure(HERE, options.parts, made, tables)


if __name__ == "__main__":
    sys.exit(main())
