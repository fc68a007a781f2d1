"""The tables in README.md, of results/mutants.jsonl and results/tests.jsonl.

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
BEGIN, END = "<!-- results: written by tables.py -->\n", "<!-- end of results -->"


def read() -> list[Row]:
    """The mutants, with the test that saw each, "" if none did, None if tests were not run."""
    tests = {row["key"]: row["test"] for row in _lines("tests.jsonl")}
    return [{**row, "test": tests.get(row["key"])} for row in _lines("mutants.jsonl")]


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
    sampled = [row for row in rows if row["effect"] in ("plan", "none") and row["test"] is not None]
    caught = sum(bool(row["test"]) for row in sampled)
    ended = sum(row["effect"] in SEEN and row["says"].startswith(ENDS) for row in rows)
    untried = counts["plan"] + counts["none"] - (len(sampled) - caught)
    more = round(untried * caught / max(1, len(sampled)))  # as many of these as of the sample
    likely = changing + more
    shares = [
        f"- {len(rows)} mutants, of which {changing} are known to change something.",
        f"- Caught by verify or the tests: {by_verify + counts['tests']}"
        f" ({(by_verify + counts['tests']) / changing:.0%}).",
        f"- Caught by verify alone: {by_verify} ({by_verify / changing:.0%}); in {ended} of them"
        " the run dies, hangs or is refused.",
        f"- The tests were run on {len(sampled)} drawn from those that verify finds equal, and see"
        f" {caught}. If that share holds for the {untried} on which they were not run, {likely}"
        f" change something, and verify alone catches {by_verify / likely:.0%}.",
        f"- The first name is that of the right module for {names['right']} of the {names.total()}"
        f" for which it can be told ({names['right'] / max(1, names.total()):.0%}): of these and of"
        f" {len(inside)} mutants of another draw, of lines alone that run in forwards of modules.",
    ]
    return [textwrap.fill(each, 100, subsequent_indent="  ") for each in shares] + [""]


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
        "Mutants that change numbers of which verify says nothing:",
        "",
        *listed(rows),
    ]
    before, rest = README.read_text().split(BEGIN)
    README.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
