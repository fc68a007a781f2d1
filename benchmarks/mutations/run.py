"""Does anything see a fault in weft's source? Changes it by rule, one change at a time, and runs
`weft verify`'s comparison on small models that reach the changed function; both sides run the
change.

    python benchmarks/mutations/run.py --count 600
    python benchmarks/mutations/run.py --count 300 --inside  # for the first names
    python benchmarks/mutations/run.py --count 120 --seed 1 --into fresh  # others than those
    python benchmarks/mutations/survivors.py  # runs the tests on what verify does not see
    python benchmarks/mutations/tables.py  # the tables in README.md

Writes results/mutants.jsonl, or, with --inside, results/inside.jsonl, of lines alone that run in
forwards of modules, or the file that --into names; what any of these has is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE.parents[1]), str(HERE)]

from judge import by_verify  # noqa: E402
from mutants import all_mutants, drawn  # noqa: E402
from pairs import reached_lines  # noqa: E402
from subjects import PAIRS  # noqa: E402

from weft.launch.local_workers import Pool  # noqa: E402

RESULTS = HERE / "results"


def keys(path: Path) -> set[str]:
    """The mutants of a file of results."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {json.loads(line)["key"] for line in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inside", action="store_true")
    parser.add_argument("--module", default="", help="of this module alone")
    parser.add_argument("--pairs", default="", help="a regex: those pairs alone that it finds")
    parser.add_argument("--into", default="", help="a file in results, without .jsonl")
    args = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{args.into or ('inside' if args.inside else 'mutants')}.jsonl"
    others = [file for file in RESULTS.glob("*.jsonl") if args.into and file != path]
    kept, earlier = keys(path), {key for file in others for key in keys(file)}
    with Pool(4) as pool:
        pairs = [pair for pair in PAIRS if re.search(args.pairs, str(pair))]
        inside = [pair for pair in pairs if pair.way == "verify"]
        reached = reached_lines(pool, inside if args.inside else pairs)
        mutants = all_mutants(reached.lines if not args.inside else reached.in_modules())
        mutants = [m for m in mutants if args.module in ("", m.module) and m.key not in earlier]
        print(f"{len(mutants)} mutants of {len({m.module for m in mutants})} modules", flush=True)
        chosen = drawn(mutants, args.count, args.seed)
        for number, mutant in enumerate(chosen):
            if mutant.key in kept:
                continue
            verdict = by_verify(pool, mutant, reached, args.inside)
            with path.open("a") as file:
                row = {"key": mutant.key, **asdict(mutant), **asdict(verdict)}
                file.write(json.dumps(row) + "\n")
            print(
                f"{number + 1}/{len(chosen)} {mutant.key} line {mutant.line} {mutant.rule}: "
                f"{mutant.old[:40]!r} -> {mutant.new[:40]!r}: {verdict.effect.upper()} "
                f"{verdict.first} {verdict.says[:80]} ({verdict.seconds:.1f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
