"""Does anything see a fault in weft's source? Changes it by rule, one change at a time, and runs
`weft verify`'s comparison on small models that reach the changed function; both sides run the
change.

    python benchmarks/mutations/run.py --count 184  # as many, the same number of each module

Writes results/mutants.jsonl (what is there already is not run again) and the tables in README.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import sys
import time
from collections import Counter, defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

from rules import changes  # noqa: E402
from subjects import PAIRS, Line, Outcome, lines_of, verified  # noqa: E402

from tests.mutants import exchanged  # noqa: E402
from weft.core.errors import Refusal, WorkerDied  # noqa: E402
from weft.core.layout import Layout  # noqa: E402
from weft.launch.local_workers import Pool  # noqa: E402

RESULTS, README = HERE / "results" / "mutants.jsonl", HERE / "README.md"
# what computes; `core` holds data, and errors, texts and checks change no number
PACKAGES = ("engine", "parallel", "pipeline", "sync", "nn")
LEFT_OUT = re.compile(r"_text|draw_watch|state_watch|_checks|metrics|trial|mixed_samples|audit")
TIMEOUT_S = 120.0
EFFECTS = ("seen", "missed", "plan", "none")
MOST_PAIRS = 6  # comparisons of one mutant


@dataclass(frozen=True)
class Mutant:
    """A change: the `place`-th of those of its function."""

    module: str
    function: str
    place: int
    line: int
    rule: str
    old: str
    new: str

    @property
    def key(self) -> str:
        return f"{self.module}:{self.function}:{self.place}"


@dataclass(frozen=True)
class Verdict:
    """What a mutant does. `effect`: "seen" (verify says something), "missed" (other numbers, and
    verify says nothing), "plan" (the same numbers by another plan), "none" on these models.
    `says`: what verify says, of `pair`."""

    effect: str
    says: str
    pair: str
    seconds: float


def all_mutants(reached: dict[Line, list[int]]) -> list[Mutant]:
    found = []
    for path in sorted((ROOT / "src" / "weft").rglob("*.py")):
        relative = path.relative_to(ROOT / "src").with_suffix("")
        module = ".".join(relative.parts)
        if relative.parts[1] not in PACKAGES or LEFT_OUT.search(module):
            continue
        if not any(name == module for name, _ in reached):
            continue
        counts: Counter[str] = Counter()
        for change in changes(path.read_text(), str(path), compiled=False):
            place = counts[change.function]
            counts[change.function] += 1
            if (module, change.line) in reached:
                found.append(
                    Mutant(
                        module,
                        change.function,
                        place,
                        change.line,
                        change.rule,
                        change.old,
                        change.new,
                    )
                )
    return found


def in_place(mutant: Mutant | None) -> AbstractContextManager[None]:
    """In this context the process runs the mutant."""
    if mutant is None:
        return nullcontext()
    module = importlib.import_module(mutant.module)
    path = Path(str(module.__file__))
    made = changes(path.read_text(), str(path), only=(mutant.function, mutant.place))
    code = next(made).code
    assert code is not None
    return exchanged(module, mutant.function, code)


def judged(mutant: Mutant | None, model: str, layout: str) -> Outcome:
    with in_place(mutant):
        return verified(model, layout)


def by_verify(pool: Pool, mutant: Mutant, pairs: list[int], clean: list[Outcome]) -> Verdict:
    start, effect = time.perf_counter(), "none"
    for index in pairs[:MOST_PAIRS]:
        model, layout = PAIRS[index]
        world, pair = Layout.parse(layout).world, f"{model} {layout}"
        try:
            found = pool.run(judged, mutant, model, layout, world=world, timeout=TIMEOUT_S)[0]
        except (Refusal, WorkerDied) as error:
            said = str(error).replace(str(ROOT), "").strip().splitlines()
            says = f"{type(error).__name__}: {said[-1][-200:] if said else ''}"
            return Verdict("seen", says, pair, time.perf_counter() - start)
        if found.says:
            return Verdict("seen", found.says, pair, time.perf_counter() - start)
        if not np.allclose(found.numbers, clean[index].numbers, rtol=1e-8, atol=1e-12):
            return Verdict("missed", "", pair, time.perf_counter() - start)
        if found.ran != clean[index].ran:
            effect = "plan"
    return Verdict(effect, "", "", time.perf_counter() - start)


def lines_reached(pool: Pool) -> tuple[dict[Line, list[int]], list[Outcome]]:
    """(line -> the pairs that run it, quickest first; what each pair does without a mutant)."""
    clean: list[Outcome] = []
    found: dict[Line, list[tuple[float, int]]] = defaultdict(list)
    for index, (model, layout) in enumerate(PAIRS):
        world = Layout.parse(layout).world
        clean += pool.run(judged, None, model, layout, world=world, timeout=300)[:1]
        start = time.perf_counter()
        pool.run(judged, None, model, layout, world=world, timeout=300)
        seconds = time.perf_counter() - start
        ranks = pool.run(lines_of, model, layout, world=world, timeout=300)
        print(f"{model} {layout}: {clean[-1].says or 'equal'} {seconds:.1f} s", flush=True)
        if clean[-1].says:
            raise SystemExit(f"{model} {layout} is not equal without a change")
        for line in set().union(*ranks):
            found[line].append((seconds, index))
    return {line: [i for _, i in sorted(pairs)] for line, pairs in found.items()}, clean


def drawn(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """So many of them, the same number of each module as far as it goes."""
    shuffle = random.Random(seed)
    by_module: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        by_module[mutant.module].append(mutant)
    for each in by_module.values():
        shuffle.shuffle(each)
    chosen: list[Mutant] = []
    while len(chosen) < count and any(by_module.values()):
        for each in by_module.values():
            if each and len(chosen) < count:
                chosen.append(each.pop())
    return chosen


def write_tables(rows: list[dict[str, Any]]) -> None:
    """The results by package and by rule, in README.md."""
    lines = []
    keys = {"package": lambda row: row["module"].split(".")[1], "rule": lambda row: row["rule"]}
    for title, key in keys.items():
        lines += [f"| {title} | {' | '.join(EFFECTS)} |", "|---|" + "---:|" * len(EFFECTS)]
        groups: dict[str, Counter[str]] = defaultdict(Counter)
        for row in rows:
            groups[key(row)][row["effect"]] += 1
            groups["~all"][row["effect"]] += 1
        for name, effects in sorted(groups.items()):
            counts = " | ".join(str(effects[effect]) for effect in EFFECTS)
            lines.append(f"| {name.removeprefix('~')} | {counts} |")
        lines.append("")
    for row in rows:
        if row["effect"] == "missed":
            where = f"`{row['module']}`, line {row['line']}"
            lines.append(f"- missed: {where}: `{row['old']}` becomes `{row['new']}`")
    begin, end = "<!-- results: written by run.py -->\n", "<!-- end of results -->"
    before, rest = README.read_text().split(begin)
    README.write_text(before + begin + "\n" + "\n".join(lines) + "\n" + end + rest.split(end)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    kept: dict[str, dict[str, Any]] = {}
    if RESULTS.exists():
        rows = (json.loads(line) for line in RESULTS.read_text().splitlines())
        kept = {row["key"]: row for row in rows}
    with Pool(4) as pool:
        reached, clean = lines_reached(pool)
        chosen = drawn(all_mutants(reached), args.count, args.seed)
        for number, mutant in enumerate(chosen):
            if mutant.key in kept:
                continue
            verdict = by_verify(pool, mutant, reached[mutant.module, mutant.line], clean)
            kept[mutant.key] = {"key": mutant.key, **asdict(mutant), **asdict(verdict)}
            with RESULTS.open("a") as file:
                file.write(json.dumps(kept[mutant.key]) + "\n")
            print(
                f"{number + 1}/{len(chosen)} {mutant.key} line {mutant.line} {mutant.rule}: "
                f"{mutant.old[:40]!r} -> {mutant.new[:40]!r}: {verdict.effect.upper()} "
                f"{verdict.says[:80]} ({verdict.seconds:.1f} s)",
                flush=True,
            )
    rows = [kept[m.key] for m in chosen if m.key in kept]
    for row in rows:
        if row["effect"] == "missed":
            where = f"{row['module']}:{row['line']} {row['function']}"
            print(f"missed: {where}: {row['rule']}: {row['old'][:60]!r} -> {row['new'][:60]!r}")
    effects = Counter(row["effect"] for row in rows)
    changing = effects["seen"] + effects["missed"]
    write_tables(rows)
    print(dict(effects), f"verify sees {effects['seen']} of {changing} that change numbers or stop")


if __name__ == "__main__":
    main()
