"""Experts that ranks share: steps beside those of as many processes that share none, and with
uneven gates.

    python benchmarks/experts/run.py  # both parts: about 4 minutes on 2 cores, idle
    python benchmarks/experts/run.py overhead --rounds 31
    python benchmarks/experts/run.py skew

Each part writes results/PART.json, then the tables in README.md are written anew. Exit code 1 if a
target is missed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import parts  # noqa: E402
import worker  # noqa: E402

from weft.core.layout import Layout  # noqa: E402
from weft.launch.local_workers import run_workers  # noqa: E402

LAYOUTS = ("ep2", "ep4")
TOKENS = 2048  # of a rank
SIZES = ((256, 128), (256, 512), (256, 2048), (512, 512))  # of tokens, and within an expert
SKEWED = (256, 1024)
FACTORS = (1.0, 1.25, 1.5, 1.75, 2.0)  # rows of the busiest rank, of the mean
AGREE = 1e-5  # relative difference of losses, float32


def overhead(rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dim, hidden in SIZES:
        each = found[f"{dim}, {hidden}"] = {}
        for layout in ("dp1", *LAYOUTS):
            ranks = Layout.parse(layout).world
            each[layout] = run_workers(
                worker.beside, ranks, layout, dim, hidden, TOKENS, rounds, threads=1
            )
            medians = {
                side: round(median(_steps(each[layout], side)), 4) for side in each[layout][0]
            }
            print(f"{dim}, {hidden}, {ranks} processes: {medians} s", flush=True)
    return found


def skew(rounds: int) -> dict[str, Any]:
    found = {}
    for layout in LAYOUTS:
        ranks = run_workers(
            worker.skewed,
            Layout.parse(layout).world,
            layout,
            FACTORS,
            *SKEWED,
            TOKENS,
            rounds,
            threads=1,
        )
        found[layout] = ranks
        even = _steps(ranks, str(FACTORS[0]))
        ratios = [round(median(_ratios(_steps(ranks, str(f)), even)), 3) for f in FACTORS]
        print(layout, dict(zip(FACTORS, ratios, strict=True)), flush=True)
    return found


def formula(one: dict[str, Any], dim: int) -> int:
    """Bytes that a rank's all-to-alls of a step give it, float32: rows that come to its experts and
    rows that come back to its tokens, as many again in backward, and how many rows come, an int64
    of each expert."""
    return 2 * (one["rows"] + TOKENS * worker.ACTIVE) * dim * 4 + worker.EXPERTS * 8


def _steps(ranks: list[dict[str, Any]], side: str) -> list[float]:
    """Seconds of each step, which lasts until the last rank is done."""
    return [max(each) for each in zip(*(rank[side]["seconds"] for rank in ranks), strict=True)]


def _busy(ranks: list[dict[str, Any]], side: str) -> list[float]:
    """Seconds of processors in each step, of all ranks together."""
    return [sum(each) for each in zip(*(rank[side]["cpu"] for rank in ranks), strict=True)]


def _ratios(these: list[float], those: list[float]) -> list[float]:
    return [this / that for this, that in zip(these, those, strict=True)]


def _spread(ratios: list[float]) -> str:
    low, middle, high = quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} - {high:.2f})"


def _exchanged(ranks: list[dict[str, Any]], side: str) -> float:
    """The share of a step that ranks spend in exchanges: their mean, of the median step."""
    return mean(median(_ratios(rank[side]["exchange"], rank[side]["seconds"])) for rank in ranks)


def _cores(runs: list[list[dict[str, Any]]]) -> str:
    """What processes without exchange had of a core: one, on an idle machine that has one for
    each."""
    had: dict[int, list[float]] = {}
    for ranks in runs:
        took = sum(sum(rank["part"]["seconds"]) for rank in ranks)
        had.setdefault(len(ranks), []).append(sum(_busy(ranks, "part")) / took)
    return "Cores that a process without exchange had: " + ", ".join(
        f"{mean(shares):.2f} where there were {count}" for count, shares in had.items()
    )


def overheads(runs: dict[str, Any]) -> tuple[list[str], bool]:
    held = True
    lines = ["### Beside as many processes without exchange", ""]
    lines += [
        (
            "| dim, hidden | layout | one process, s | layout, s | / all experts in each, median"
            " (quartiles) | / a rank's part in each | processor's time / a rank's part | in"
            " exchanges | bytes of a rank | as the formula | same loss |"
        ),
        "| --- | --- |" + " ---: |" * 7 + " --- | --- |",
    ]
    for size, each in runs.items():
        dim, single = int(size.split(",")[0]), median(_steps(each["dp1"], "all"))
        for layout in LAYOUTS:
            ranks = each[layout]
            ours, every, part = (_steps(ranks, side) for side in (layout, "all", "part"))
            exact = all(rank[layout]["sent"] == formula(rank[layout], dim) for rank in ranks)
            want = mean(rank["all"]["loss"] for rank in ranks)
            same = all(abs(rank[layout]["loss"] - want) <= AGREE * want for rank in ranks)
            held &= exact and same
            busy = median(_ratios(_busy(ranks, layout), _busy(ranks, "part")))
            cells = [size, layout, f"{single:.3f}", f"{median(ours):.3f}"]
            cells += [_spread(_ratios(ours, every)), _spread(_ratios(ours, part)), f"{busy:.2f}"]
            cells += [
                f"{_exchanged(ranks, layout):.0%}",
                f"{max(rank[layout]['sent'] for rank in ranks):,}",
            ]
            cells += ["holds" if verdict else "FAIL" for verdict in (exact, same)]
            lines.append("| " + " | ".join(cells) + " |")
    return [
        *lines,
        "",
        _cores([each[layout] for each in runs.values() for layout in LAYOUTS]),
        "",
    ], held


def _shared(work: Sequence[float], cpus: int) -> float:
    """How long ranks take that share cores evenly while they have work, and leave theirs to the
    others after it."""
    took = done = 0.0
    for ended, each in enumerate(sorted(work)):
        took += (each - done) / min(1.0, cpus / (len(work) - ended))
        done = each
    return took


def skews(runs: dict[str, Any], cpus: int) -> tuple[list[str], bool]:
    held = True
    lines = ["### A gate that is not even", ""]
    lines += [
        (
            "| layout | rows of each rank | busiest rank | its rows / mean | its processor's time /"
            " balanced | of a core it had | step: expected of the cores | step / balanced, median"
            " (quartiles) | of the fastest steps | bytes | busiest works most |"
        ),
        "| --- | --- |" + " ---: |" * 7 + " --- | --- |",
    ]
    for layout, ranks in runs.items():
        even = str(FACTORS[0])
        cpu = {factor: [median(rank[factor]["cpu"]) for rank in ranks] for factor in ranks[0]}
        for factor in ranks[0]:
            rows = [rank[factor]["rows"] for rank in ranks]
            busiest = rows.index(max(rows))
            most = max(rows) * len(rows) / sum(rows)
            expected = _shared(rows, cpus) / _shared([sum(rows) / len(rows)] * len(rows), cpus)
            exact = all(rank[factor]["sent"] == formula(rank[factor], SKEWED[0]) for rank in ranks)
            follows = factor == even or cpu[factor].index(max(cpu[factor])) == busiest
            held &= exact and follows
            name = "" if factor == even else str(busiest)
            verdict = "" if factor == even else "holds" if follows else "FAIL"
            steps, balanced = _steps(ranks, factor), _steps(ranks, even)
            core = sum(ranks[busiest][factor]["cpu"]) / sum(ranks[busiest][factor]["seconds"])
            lines.append(
                f"| {layout} | {', '.join(f'{n:,}' for n in rows)} | {name} | {most:.2f} |"
                f" {cpu[factor][busiest] / mean(cpu[even]):.2f} | {core:.2f} | {expected:.2f} |"
                f" {_spread(_ratios(steps, balanced))} | {min(steps) / min(balanced):.2f} |"
                f" {'holds' if exact else 'FAIL'} | {verdict} |"
            )
    return [*lines, ""], held


def tables(results: dict[str, dict[str, Any]]) -> tuple[list[str], bool]:
    lines: list[str] = []
    held = True
    if found := results.get("overhead"):
        more, well = overheads(found["runs"])
        lines, held = lines + more, held and well
    if found := results.get("skew"):
        more, well = skews(found["runs"], found["environment"]["cpus"])
        lines, held = lines + more, held and well
    return lines, held


def main() -> int:
    measured = {"overhead": lambda: overhead(options.rounds), "skew": lambda: skew(options.rounds)}
    parser = parts.parser(__doc__, measured)
    parser.add_argument(
        "--rounds", type=int, default=11, help="in which all sides take a step each (at least 2)"
    )
    options = parser.parse_args()
    return parts.measure(HERE, options.parts, measured, tables)


if __name__ == "__main__":
    sys.exit(main())
