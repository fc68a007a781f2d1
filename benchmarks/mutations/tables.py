"""The tables in README.md, of results/mutants.jsonl, tests.jsonl and again.jsonl; and of
beside_numbers.jsonl: of mutants that verify finds equal and a test sees, those that change no
number of a run, and what they do change, as the source was read.

python benchmarks/mutations/tables.py
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
README, RESULTS = HERE / "README.md", HERE / "results"
Row = dict[str, Any]
SEEN = ("verify", "deep", "late")
ENDS = ("WorkerDied", "Died", "UnsupportedModel", "LayoutError", "ConfigError", "DataError")
COLUMNS = (*SEEN, "tests", "survive", "plan", "none")
LATER = {"fresh": "of all modules", "runner": "of `weft.engine.pipeline.runner`"}
BEGIN, END = "<!-- results: written by tables.py -->\n", "<!-- end of results -->"


def read() -> list[Row]:
    """The mutants, with the test that saw each, "" if none did, None if tests were not run; with
    what verify found when they were drawn, and what those that change no number do change."""
    tests = {row["key"]: row["test"] for row in _lines("tests.jsonl")}
    again = {row["key"]: row for row in _lines("again.jsonl")}
    beside = {row["key"]: row["changes"] for row in _lines("beside_numbers.jsonl")}
    rows = []
    for row in _lines("mutants.jsonl"):
        key = row["key"]
        told = {"test": tests.get(key), "beside": beside.get(key), "found": row["effect"]}
        now = again.get(key, {"says": ""})
        rows.append({**row, **(now if now["says"] else {}), **told})
    return rows


def _lines(name: str) -> list[Row]:
    path = RESULTS / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def scored(rows: list[Row]) -> list[Row]:
    """Those of a first name that is right or wrong, each once: also of the draw inside modules."""
    found = {row["key"]: row for row in [*rows, *_lines("inside.jsonl")] if row["first"]}
    return list(found.values())


def column(row: Row) -> str:
    """Who sees a mutant that verify does not, or what it does."""
    if row["effect"] in SEEN:
        return str(row["effect"])
    if row["test"]:
        return "tests"
    return "survive" if row["effect"] == "missed" else str(row["effect"])


def table(title: str, rows: list[Row], key: Callable[[Row], str]) -> list[str]:
    lines = [f"| {title} | {' | '.join(COLUMNS)} |", "|---|" + "---:|" * 7]
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    for name, each in [*sorted(groups.items()), ("all", rows)]:
        counts = Counter(map(column, each))
        lines.append(f"| {name} | {' | '.join(str(counts[c]) for c in COLUMNS)} |")
    return [*lines, ""]


def summary(rows: list[Row]) -> list[str]:
    counts = Counter(map(column, rows))
    by_verify = sum(counts[each] for each in SEEN)
    changing = by_verify + counts["tests"] + counts["survive"]
    inside, named = _lines("inside.jsonl"), scored(rows)
    names = Counter(row["first"] for row in named)
    sampled = [row for row in rows if row["found"] in ("plan", "none") and row["test"] is not None]
    by_tests = [row for row in sampled if row["test"]]
    numbers = [row for row in by_tests if not row["beside"]]
    now = sum(row["effect"] in SEEN for row in numbers)
    ended = sum(row["effect"] in SEEN and row["says"].startswith(ENDS) for row in rows)
    equal = [row for row in rows if row["effect"] in ("plan", "none")]
    untried = sum(row["test"] is None for row in equal)
    # as many of these as of the sample
    any_change, of_numbers, seen_now = (
        untried * count / max(1, len(sampled)) for count in (len(by_tests), len(numbers), now)
    )
    beside = sum(bool(row["beside"]) for row in by_tests)
    likely = (by_verify + seen_now) / (changing + any_change)
    likely_numbers = (by_verify + seen_now) / (changing - beside + of_numbers)
    shares = [
        f"- {len(rows)} mutants, of which {changing} are known to change something.",
        f"- Caught by verify or the tests: {by_verify + counts['tests']}"
        f" ({(by_verify + counts['tests']) / changing:.0%}).",
        f"- Caught by verify alone: {by_verify} ({by_verify / changing:.0%}); in {ended} of them"
        " the run dies, hangs or is refused.",
        f"- The tests were run on {len(sampled)} drawn from those that verify found equal, and see"
        f" {len(by_tests)}. {beside} of these change no number of a run (listed). Of the"
        f" {len(numbers)} others verify sees {now} now, on a model that has what the line is for.",
        f"- If the same holds for the {untried} on which the tests were not run, verify alone"
        f" catches {likely_numbers:.0%} of what changes numbers, and {likely:.0%} of what changes"
        " anything that a test sees.",
        f"- The first name is that of the right module for {names['right']} of the {names.total()}"
        f" for which it can be told ({names['right'] / max(1, names.total()):.0%}): of these and of"
        f" {len(inside)} mutants of another draw, of lines alone that run in forwards of modules.",
    ]
    return [textwrap.fill(each, 100, subsequent_indent="  ") for each in shares] + [""]


def later_draws() -> list[str]:
    """What verify said of mutants that were drawn after all that is told above."""
    found = []
    for name, of in LATER.items():
        rows = _lines(f"{name}.jsonl")
        effects = Counter(row["effect"] for row in rows)
        seen, missed = sum(effects[each] for each in SEEN), effects["missed"]
        ended = sum(row["effect"] in SEEN and row["says"].startswith(ENDS) for row in rows)
        names = Counter(row["first"] for row in rows if row["first"])
        told = (
            f"- `results/{name}.jsonl`, {of}: {len(rows)} mutants. Verify alone sees {seen} of the"
        )
        told += f" {seen + missed} that change numbers or end the run ({ended} of these end), and"
        told += (
            f" {sum(map(effects.get, ('none', 'plan'), (0, 0)))} change nothing of these models."
        )
        told += f" First names: {names['right']} right, {names['wrong']} wrong."
        found.append(textwrap.fill(told, 100, subsequent_indent="  "))
    return [*found, ""]


def first_names(rows: list[Row]) -> list[str]:
    """By module: how many first names are right; and the wrong ones."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in scored(rows):
        groups[row["module"]].append(row)
    lines, listed = ["| module | right | wrong |", "|---|---:|---:|"], list[str]()
    for module, each in sorted(groups.items()):
        wrong = [row for row in each if row["first"] == "wrong"]
        lines.append(f"| `{module}` | {len(each) - len(wrong)} | {len(wrong)} |")
        for row in wrong:
            listed += [f"- `{module}`, line {row['line']}:", f"  {row['says'].partition(' (')[0]}"]
    return [*lines, "", "First names that are wrong:", "", *listed, ""]


def listed(rows: list[Row]) -> list[str]:
    """Mutants that change numbers of which verify says nothing."""
    found = []
    for row in sorted(rows, key=lambda row: (row["module"], row["line"])):
        if row["effect"] == "missed":
            told = {None: "tests were not run", "": "survives"}.get(row["test"])
            told = told or f"seen by `{row['test'].partition('[')[0]}`"
            old, new = (" ".join(row[each].split())[:70] for each in ("old", "new"))
            found += [f"- `{row['module']}`, line {row['line']},", f"  `{old}`", "  becomes"]
            found += [f"  `{new}`:", f"  {told}"]
    return found


def main() -> None:
    rows = read()
    lines = [
        *summary(rows),
        *table("package", rows, lambda row: row["module"].split(".")[1]),
        *table("rule", rows, lambda row: row["rule"]),
        *first_names(rows),
        "Drawn later, of mutants that no other file has, before anything was added for them:",
        "",
        *later_draws(),
        "Mutants of the sample that change no number of a run, and are seen by tests alone:",
        "",
        *(
            f"- `{row['module']}`, line {row['line']}: {row['beside']}"
            for row in rows
            if row["beside"]
        ),
        "",
        "Mutants that change numbers of which verify says nothing:",
        "",
        *listed(rows),
    ]
    before, rest = README.read_text().split(BEGIN)
    README.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
