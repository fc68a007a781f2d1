"""weft's cost model beside Calculon, llm-analysis and SimuMax, on the same published rows.

    python benchmarks/planners/run.py --peers DIR          all parts; some 20 minutes
    python benchmarks/planners/run.py weft                 what weft says, beside what the peers last said

DIR has the peers' repositories (calculon, llm-analysis, SimuMax), each with its own environment in .venv. Each part
writes results/PART.json, then the tables in README.md are written anew.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PUBLISHED = HERE.parent / "published"
sys.path[:0] = [str(HERE), str(HERE.parent)]

import parts  # noqa: E402
import rows as published  # noqa: E402
import scores  # noqa: E402
import search  # noqa: E402
from rows import Row  # noqa: E402

PEERS = {"Calculon": "calculon", "llm-analysis": "llm-analysis", "SimuMax": "SimuMax"}  # name -> folder
NO_LIMIT_S, SEARCH_S = 1e9, 60.0
Sets = Mapping[str, Sequence[Row]]  # by source
Said = Mapping[str, scores.Steps]  # by side


# ---- the sides -------------------------------------------------------------------------------------------------------


def peer(name: str, folder: Path, rows: Sequence[Row], limit_s: float) -> dict[str, Any]:
    """What this peer says of each row, or why it cannot; its commit; the seconds that it took."""
    checkout = folder / PEERS[name]
    driver = HERE / f"drive_{PEERS[name].lower().replace('-', '_')}.py"
    with tempfile.TemporaryDirectory() as scratch:
        given, out = Path(scratch, "rows.json"), Path(scratch, "out.json")
        given.write_text(json.dumps([asdict(row) for row in rows]))
        python = checkout / ".venv/bin/python"
        subprocess.run([python, driver, checkout, given, out, str(limit_s)], check=True, stderr=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(out.read_text())
    commit = ["git", "-C", checkout, "rev-parse", "HEAD"]
    return found | {"commit": subprocess.run(commit, check=True, capture_output=True, text=True).stdout.strip()}


def weft() -> dict[str, float]:
    """weft's seconds of a step for each row that it covers, of all published tables."""
    steps = {}
    with tempfile.TemporaryDirectory() as scratch:
        for table in ("training_runs.csv", "vtrain_single_node.csv"):
            out = Path(scratch, table)
            command = [sys.executable, PUBLISHED / "run.py", "--runs", PUBLISHED / "data" / table, "--out", out]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            with out.open() as file:
                steps |= {row["row_id"]: float(row["predicted_iter_time_s"]) for row in csv.DictReader(file)}
    return steps


def constant(rows: Iterable[Row]) -> dict[str, float]:
    """No planner at all: every device reaches 45 % of its peak. FLOPs of Narayanan et al. 2021 with full recomputation,
    and without it."""
    steps = {}
    for row in rows:
        if row.accelerator.startswith("A100") and not row.gated:
            full, h = row.recompute == "full", row.hidden
            layers = (96 if full else 72) * row.layers * row.seq_len * h * h
            ends = row.vocab / ((16 if full else 12) * row.layers * h)
            steps[row.id] = row.batch * layers * (1 + row.seq_len / (6 * h) + ends) / (0.45 * 312e12 * row.devices)
    return steps


# ---- parts -----------------------------------------------------------------------------------------------------------


def ours() -> dict[str, Any]:
    known = {row.id for row in published.read(PUBLISHED / "data")}
    return {"said_s": {"weft": {row: _short(step) for row, step in weft().items() if row in known}}}


def theirs(folder: Path) -> dict[str, Any]:
    rows = published.read(PUBLISHED / "data")
    commits, said, cannot = {}, {}, {}
    for name in PEERS:
        found = peer(name, folder, rows, NO_LIMIT_S)
        commits[name] = found["commit"]
        said[name] = {row: _short(one["step_s"]) for row, one in found["rows"].items() if "step_s" in one}
        cannot[name] = {row: one["cannot"] for row, one in found["rows"].items() if "cannot" in one}
        print(f"{name}: {len(said[name])} of {len(rows)} rows in {found['took_s']:.0f} s", flush=True)
    return {"commits": commits, "said_s": said, "cannot": cannot}


def _short(step_s: float) -> float:
    return float(f"{step_s:.5g}")


def speed(folder: Path) -> dict[str, Any]:
    layouts = search.layouts()
    rates = {f"weft, {how}": rate for how, rate in search.weft(layouts, SEARCH_S / 4).items()}
    for name in PEERS:
        found = peer(name, folder, layouts, SEARCH_S)
        rates[name] = sum("step_s" in one for one in found["rows"].values()) / found["took_s"]
    return {"layouts": len(layouts), "limit_s": SEARCH_S, "per_s": rates}


# ---- tables ----------------------------------------------------------------------------------------------------------


def tables(results: parts.Results) -> tuple[list[str], bool]:
    lines: list[str] = []
    found = {part: results[part]["runs"] for part in results}
    if "weft" in found and "peers" in found:
        rows = published.read(PUBLISHED / "data")
        said: dict[str, scores.Steps] = found["weft"]["said_s"] | found["peers"]["said_s"]
        sets: dict[str, list[Row]] = {published.CLASSIC: [row for row in rows if published.classic(row)]}
        for row in rows:
            if not published.classic(row):
                sets.setdefault(row.source, []).append(row)
        lines += _accuracy(sets, said | {"45 % of the peak": constant(rows)}) + _choosing(sets, said)
        lines += _classic(sets[published.CLASSIC], said) + _bias(sets[published.SINGLE_NODE], said)
        lines += _cannot(rows, found["peers"]["cannot"])
        commits = found["peers"]["commits"]
        lines += [f"Peers as of {', '.join(f'{name} {commit[:10]}' for name, commit in commits.items())}.", ""]
    if "speed" in found:
        lines += ["| layouts a second, time and memory | |", "| --- | ---: |"]
        for name, rate in found["speed"]["per_s"].items():
            lines.append(f"| {name} | {rate:,.0f} |" if rate > 10 else f"| {name} | {rate:.2g} |")
    return lines, True


def _accuracy(sets: Sets, said: Said) -> list[str]:
    lines = ["| step time | | says, of all rows | median | mean | max | bias |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    for source, rows in sets.items():
        for side, steps in said.items():
            score = scores.accuracy(rows, steps)
            cells = [source, side, f"{score['covered']} of {len(rows)}"]
            if score["covered"]:
                cells += [f"{score[key]:.1%}" for key in ("median", "mean", "max")] + [f"{score['bias']:+.1%}"]
            lines.append(_line(cells, 7))
    return [*lines, ""]


def _choosing(sets: Sets, said: Said) -> list[str]:
    """All of those who say anything of a source choose among the same rows: those that all of them say."""
    lines = ["| choosing | | groups | layouts | Spearman, mean | lost by the first pick, mean | max |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    for source, rows in sets.items():
        able = {side: steps for side, steps in said.items() if any(row.id in steps for row in rows)}
        same = [row for row in rows if all(row.id in steps for steps in able.values())]
        for side, steps in able.items():
            if (score := scores.choosing(same, steps))["groups"]:
                cells = [source, side, f"{score['groups']}", f"{score['layouts']}", f"{score['spearman']:.2f}"]
                lines.append(_line([*cells, f"{score['lost']:.1%}", f"{score['lost_max']:.1%}"], 7))
    return [*lines, ""]


def _classic(rows: Sequence[Row], said: Said) -> list[str]:
    lines = [f"| {published.CLASSIC} | layout | recompute | measured, s | {' | '.join(said)} |"]
    lines += [f"| --- | --- | --- | ---: |{' ---: |' * len(said)}"]
    for row in rows:
        cells = [row.id, f"pp{row.pp}.dp{row.dp}.tp{row.tp}", row.recompute, f"{scores.measured(row):.2f}"]
        errors = [steps[row.id] / scores.measured(row) - 1 if row.id in steps else None for steps in said.values()]
        lines.append(_line([*cells, *("" if error is None else f"{error:+.1%}" for error in errors)], 4 + len(said)))
    return [*lines, ""]


def _bias(rows: Sequence[Row], said: Said) -> list[str]:
    heads = [(axis, value) for axis in scores.AXES for value in sorted({getattr(row, axis) for row in rows})]
    lines = [f"| bias, {published.SINGLE_NODE} | {' | '.join(f'{axis} {value}' for axis, value in heads)} |"]
    lines += [f"| --- |{' ---: |' * len(heads)}"]
    for side, steps in said.items():
        found = [scores.accuracy([row for row in rows if getattr(row, axis) == v], steps) for axis, v in heads]
        lines.append(_line([side, *(f"{score['bias']:+.0%}" if score["covered"] else "" for score in found)], 0))
    return [*lines, ""]


def _cannot(rows: Sequence[Row], why: dict[str, dict[str, str]]) -> list[str]:
    lines = ["| has no way to say | rows | because of |", "| --- | ---: | --- |"]
    for side, refused in why.items():
        counts = Counter(refused[row.id][:60] for row in rows if row.id in refused)
        reasons = ", ".join(f"{reason} ({count})" for reason, count in counts.most_common())
        lines.append(_line([side, str(len(refused)), reasons], 3))
    return [*lines, ""]


def _line(cells: Sequence[str], width: int) -> str:
    return f"| {' | '.join([*cells, *[''] * (width - len(cells))])} |"


def main() -> int:
    parser = parts.parser(__doc__, {"weft": ours, "peers": theirs, "speed": speed})
    parser.add_argument("--peers", type=Path, metavar="DIR", help="the folder with the peers' repositories")
    options = parser.parse_args()
    if not options.parts or {"peers", "speed"} & set(options.parts):
        if options.peers is None:
            parser.error("--peers DIR: the folder that has calculon, llm-analysis and SimuMax, each with a .venv")
        for folder in PEERS.values():
            if not (options.peers / folder / ".venv/bin/python").exists():
                parser.error(f"--peers {options.peers}: {folder}/.venv/bin/python is not there; README.md says how")
    chosen = {"weft": ours, "peers": partial(theirs, options.peers), "speed": partial(speed, options.peers)}
    return parts.measure(HERE, options.parts, chosen, tables)


if __name__ == "__main__":
    sys.exit(main())
