"""weft's cost model beside Calculon, llm-analysis and SimuMax, on the same published runs.

    python benchmarks/planners/run.py --peers DIR  # all parts; about 30 minutes
    python benchmarks/planners/run.py weft  # what weft says now, beside what the peers last said
    python benchmarks/planners/run.py calculon speed --peers DIR

DIR has the peers' repositories (calculon, llm-analysis, SimuMax), each with its own environment in
.venv. Each part writes results/PART.json, then the tables in README.md are written anew.
"""

from __future__ import annotations

import csv
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PUBLISHED = HERE.parent / "published"
sys.path[:0] = [str(HERE), str(HERE.parent)]
sys.path.append(str(PUBLISHED))

import parts  # noqa: E402
import peaks  # noqa: E402
import runs as published  # noqa: E402
import scores  # noqa: E402
import search  # noqa: E402
import searches  # noqa: E402
from peers import NO_LIMIT_S, PEERS, asked, checkout_of  # noqa: E402
from runs import Run  # noqa: E402

SEARCH_S = 30.0
TABLES = ("training_runs.csv", "layout_runs.csv", "vtrain_single_node.csv")
WORST = 5  # layouts that are shown
FIGURES = {
    "median": "median error",
    "max": "worst error",
    "spearman": "Spearman",
    "lost": "lost by the first pick",
}
Sets = Mapping[str, Sequence[Run]]  # by source
Said = Mapping[str, scores.Steps]  # by side


# ---- the sides -----------------------------------------------------------------------------------


def constant(runs: Iterable[Run]) -> dict[str, float]:
    """No planner at all: every device reaches 45 % of its peak. FLOPs of Narayanan et al. 2021 with
    full recomputation, and without it."""
    steps = {}
    for run in runs:
        if run.accelerator.startswith("A100") and not run.gated:
            full, h = run.recompute == "full", run.hidden
            layers = (96 if full else 72) * run.layers * run.seq_len * h * h
            ends = run.vocab / ((16 if full else 12) * run.layers * h)
            steps[run.id] = (
                run.batch
                * layers
                * (1 + run.seq_len / (6 * h) + ends)
                / (0.45 * 312e12 * run.devices)
            )
    return steps


# ---- parts ---------------------------------------------------------------------------------------


def weft() -> dict[str, Any]:
    known, said = {run.id for run in published.read()}, {}
    with tempfile.TemporaryDirectory() as scratch:
        for table in (PUBLISHED / "data" / name for name in TABLES):
            out = Path(scratch, table.name)
            command = [sys.executable, PUBLISHED / "run.py", "--runs", table, "--out", out]
            subprocess.run(
                command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            with out.open() as file:
                said.update(
                    {
                        row["row_id"]: float(row["predicted_iter_time_s"])
                        for row in csv.DictReader(file)
                    }
                )
    return {"said_s": {run: _short(step) for run, step in said.items() if run in known}}


def peer(part: str, folder: Path) -> dict[str, Any]:
    """Runs that differ in nothing but what was measured are asked of once."""
    same: dict[Run, list[str]] = {}
    for run in published.read():
        same.setdefault(replace(run, id="", held=True, time_s=None), []).append(run.id)
    distinct = [replace(run, id=ids[0]) for run, ids in same.items()]
    at_once = os.cpu_count() or 1
    with ThreadPoolExecutor(at_once) as pool:
        shares = [distinct[i::at_once] for i in range(at_once)]
        found = list(pool.map(lambda share: asked(part, folder, share, NO_LIMIT_S), shares))
    answers = {run: answer for one in found for run, answer in one["runs"].items()}
    said, cannot = {}, {}
    for ids in same.values():
        answer = answers[ids[0]]
        if "cannot" in answer:
            cannot.update(dict.fromkeys(ids, answer["cannot"]))
        else:
            said.update(dict.fromkeys(ids, _short(answer["step_s"])))
    return {"commit": found[0]["commit"], "said_s": said, "cannot": cannot}


def _short(step_s: float) -> float:
    return float(f"{step_s:.5g}")


def speed(folder: Path) -> dict[str, Any]:
    layouts = search.layouts()
    rates = {f"weft, {how}": rate for how, rate in search.weft(layouts, SEARCH_S / 4).items()}
    for part, name in PEERS.items():
        found = asked(part, folder, layouts, SEARCH_S)
        rates[name] = sum("step_s" in one for one in found["runs"].values()) / found["took_s"]
    return {"layouts": len(layouts), "limit_s": SEARCH_S, "per_s": rates}


def memory(folder: Path) -> dict[str, Any]:
    layouts = peaks.layouts()
    found = asked("simumax", folder, layouts, NO_LIMIT_S)["runs"]
    said = {
        run: _short(answer["peak_gib"]) for run, answer in found.items() if "peak_gib" in answer
    }
    cannot = {run: answer["cannot"] for run, answer in found.items() if "cannot" in answer}
    ours = {run: _short(gib) for run, gib in peaks.weft(layouts).items()}
    return {"weft_gib": ours, "simumax_gib": said, "cannot": cannot}


# ---- tables --------------------------------------------------------------------------------------


def tables(results: parts.Results) -> tuple[list[str], bool]:
    lines: list[str] = []
    found = {part: results[part]["runs"] for part in results}
    names = {part: name for part, name in ({"weft": "weft"} | PEERS).items() if part in found}
    runs = published.read()
    said: dict[str, scores.Steps] = {name: found[part]["said_s"] for part, name in names.items()}
    if said:
        sets: dict[str, list[Run]] = {
            published.CLASSIC: [run for run in runs if published.classic(run)]
        }
        for run in runs:
            if not published.classic(run):
                sets.setdefault(run.source, []).append(run)
        lines += _accuracy(sets, said, found) + _choosing(sets, said) + _better(sets, said)
        lines += _classic(sets[published.CLASSIC], said) + _bias(sets[published.SINGLE_NODE], said)
        peers = {name: found[part] for part, name in names.items() if part in PEERS}
        lines += _cannot(runs, {name: one["cannot"] for name, one in peers.items()})
        commits = [f"{name} {one['commit'][:10]}" for name, one in peers.items()]
        lines += [f"Peers as of {', '.join(commits)}.", ""]
    if "memory" in found:
        lines += _peaks(found["memory"]["weft_gib"], found["memory"]["simumax_gib"])
    if "speed" in found:
        lines += ["| layouts a second of a core, time and memory | |", "| --- | ---: |"]
        for name, rate in found["speed"]["per_s"].items():
            lines.append(f"| {name} | {rate:,.0f} |" if rate > 10 else f"| {name} | {rate:.2g} |")
    if "searches" in found:
        lines += ["", *searches.table(found["searches"])]
    return lines, True


def _accuracy(sets: Sets, said: Said, found: Mapping[str, Any]) -> list[str]:
    """Of weft also on those runs alone that no constant of it was fitted to. `found`: by part. A
    peer may have been run before a source was there: it was not asked, which is no refusal."""
    told = {
        name: {*said[name], *found[part]["cannot"]} for part, name in PEERS.items() if name in said
    }
    lines = ["| step time | | says, of all rows | median | mean | max | bias |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    for source, runs in sets.items():
        held = [run for run in runs if run.held]
        sides = [(side, runs, steps) for side, steps in said.items()]
        sides += [
            ("weft, held out", held, said.get("weft", {})),
            ("45 % of the peak", runs, constant(runs)),
        ]
        for side, chosen, steps in sorted(sides, key=lambda one: not one[0].startswith("weft")):
            score = scores.accuracy(chosen, steps)
            new = side in told and not any(run.id in told[side] for run in chosen)
            covered = "not asked yet" if new else f"{score['covered']} of {len(chosen)}"
            cells = [source, side, covered]
            if score["covered"]:
                cells += [f"{score[key]:.1%}" for key in ("median", "mean", "max")] + [
                    f"{score['bias']:+.1%}"
                ]
            lines.append(_line(cells, 7))
    return [*lines, ""]


def _peaks(ours: Mapping[str, float], theirs: Mapping[str, float]) -> list[str]:
    """Of those that SimuMax says, by what weft differs; the worst ones."""
    apart = {run: ours[run] / gib - 1 for run, gib in theirs.items()}
    sizes = sorted(map(abs, apart.values()))
    lines = [
        (
            f"Allocated on the fullest device, {len(apart)} of {len(ours)} layouts, those that"
            " SimuMax says (its heads divide over ranks of cp): weft differs from it by"
            f" {statistics.median(sizes):.1%} (median), {statistics.fmean(apart.values()):+.1%}"
            " (mean, with its sign). Most where:"
        ),
        "",
        "| layout | weft, GiB | SimuMax, GiB | |",
        "| --- | ---: | ---: | ---: |",
    ]
    for run in sorted(apart, key=lambda run: -abs(apart[run]))[:WORST]:
        lines.append(f"| {run} | {ours[run]:.1f} | {theirs[run]:.1f} | {apart[run]:+.1%} |")
    return [*lines, ""]


def _same(runs: Sequence[Run], said: Said) -> tuple[Said, list[Run]]:
    """Who says anything of these runs, and those that all of them say."""
    able = {side: steps for side, steps in said.items() if any(run.id in steps for run in runs)}
    return able, [run for run in runs if all(run.id in steps for steps in able.values())]


def _choosing(sets: Sets, said: Said) -> list[str]:
    lines = [
        "| choosing | | groups | layouts | Spearman, mean | lost by the first pick, mean | max |"
    ]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    for source, runs in sets.items():
        able, same = _same(runs, said)
        for side, steps in able.items():
            if (score := scores.choosing(same, steps))["groups"]:
                cells = [
                    source,
                    side,
                    f"{score['groups']}",
                    f"{score['layouts']}",
                    f"{score['spearman']:.2f}",
                ]
                lines.append(_line([*cells, f"{score['lost']:.1%}", f"{score['lost_max']:.1%}"], 7))
    return [*lines, ""]


def _better(sets: Sets, said: Said) -> list[str]:
    """Every figure in which a peer is ahead of weft, on the same runs."""
    found = []
    for source, runs in sets.items():
        able, same = _same(runs, said)
        scored = {
            side: scores.accuracy(same, steps) | scores.choosing(same, steps)
            for side, steps in able.items()
        }
        for side in (side for side in scored if side != "weft" and "weft" in scored):
            for figure, sign in {"median": 1, "max": 1, "spearman": -1, "lost": 1}.items():
                its, ours = scored[side].get(figure), scored["weft"].get(figure)
                if its is not None and ours is not None and sign * its < sign * ours:
                    text = "{:.2f} for {:.2f}" if figure == "spearman" else "{:.1%} for {:.1%}"
                    found.append(f"{source}, {FIGURES[figure]}: {side} {text.format(its, ours)}")
    return [
        f"Where a peer is better than weft, on the same rows: {'; '.join(found) or 'nowhere'}.",
        "",
    ]


def _classic(runs: Sequence[Run], said: Said) -> list[str]:
    lines = [f"| {published.CLASSIC} | layout | recompute | measured, s | {' | '.join(said)} |"]
    lines += [f"| --- | --- | --- | ---: |{' ---: |' * len(said)}"]
    for run in runs:
        cells = [
            run.id,
            f"pp{run.pp}.dp{run.dp}.tp{run.tp}",
            run.recompute,
            f"{scores.measured(run):.2f}",
        ]
        errors = [
            steps[run.id] / scores.measured(run) - 1 if run.id in steps else None
            for steps in said.values()
        ]
        lines.append(
            _line(
                [*cells, *("" if error is None else f"{error:+.1%}" for error in errors)],
                4 + len(said),
            )
        )
    return [*lines, ""]


def _bias(runs: Sequence[Run], said: Said) -> list[str]:
    heads = [
        (axis, value)
        for axis in scores.AXES
        for value in sorted({getattr(run, axis) for run in runs})
    ]
    lines = [
        f"| bias, {published.SINGLE_NODE} |"
        f" {' | '.join(f'{axis} {value}' for axis, value in heads)} |"
    ]
    lines += [f"| --- |{' ---: |' * len(heads)}"]
    for side, steps in said.items():
        found = [
            scores.accuracy([run for run in runs if getattr(run, axis) == v], steps)
            for axis, v in heads
        ]
        lines.append(
            _line(
                [side, *(f"{score['bias']:+.0%}" if score["covered"] else "" for score in found)], 0
            )
        )
    return [*lines, ""]


def _cannot(runs: Sequence[Run], why: dict[str, dict[str, str]]) -> list[str]:
    lines = ["| has no way to say | rows | because of |", "| --- | ---: | --- |"]
    for side, refused in why.items():
        counts = Counter(refused[run.id][:60] for run in runs if run.id in refused)
        reasons = ", ".join(f"{reason} ({count})" for reason, count in counts.most_common())
        lines.append(_line([side, str(len(refused)), reasons], 3))
    return [*lines, ""]


def _line(cells: Sequence[str], width: int) -> str:
    return f"| {' | '.join([*cells, *[''] * (width - len(cells))])} |"


OTHERS: Mapping[str, Callable[[Path], Any]] = {
    "memory": memory,
    "searches": searches.measure,
    "speed": speed,
}  # parts that peers take part in


def main() -> int:
    measured: dict[str, Callable[..., Any]] = {
        "weft": weft,
        **{part: partial(peer, part) for part in PEERS},
    }
    parser = parts.parser(__doc__, measured | OTHERS)
    parser.add_argument(
        "--peers", type=Path, metavar="DIR", help="the folder with the peers' repositories"
    )
    options = parser.parse_args()
    if not options.parts or {*PEERS, *OTHERS} & {*options.parts}:
        if options.peers is None:
            parser.error(
                "--peers DIR: the folder that has calculon, llm-analysis and SimuMax, each with a"
                " .venv"
            )
        for part in PEERS if {*options.parts} != {"searches"} else ("calculon",):
            python = checkout_of(part, options.peers) / ".venv/bin/python"
            if not python.exists():
                parser.error(f"--peers {options.peers}: {python} is not there; README.md says how")
    folder = options.peers and options.peers.resolve()
    sys.argv = [
        "DIR" if given == str(options.peers) else given for given in sys.argv
    ]  # what results tell of a command
    chosen = {"weft": weft, **{part: partial(peer, part, folder) for part in PEERS}}
    chosen |= {part: partial(asking, folder) for part, asking in OTHERS.items()}
    return parts.measure(HERE, options.parts, chosen, tables)


if __name__ == "__main__":
    sys.exit(main())
