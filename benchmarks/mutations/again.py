"""What verify says now of mutants that it had not seen, on one pair each.

    python benchmarks/mutations/again.py KEY "verify parts fsdp2.tp2"

Writes results/again.jsonl. A row of it takes the place of what results/mutants.jsonl says.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE.parents[1]), str(HERE)]

from judge import outcome  # noqa: E402
from mutants import Mutant  # noqa: E402
from subjects import PAIRS  # noqa: E402
from survivors import FIELDS, MUTANTS, rows_of  # noqa: E402

from weft.launch.local_workers import Pool  # noqa: E402

LIMIT_S = 300.0
AGAIN = HERE / "results" / "again.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("key", help="of a mutant in results/mutants.jsonl")
    parser.add_argument("pair", help="a pair that runs its line")
    args = parser.parse_args()
    (row,) = [row for row in rows_of(MUTANTS) if row["key"] == args.key]
    (pair,) = [pair for pair in PAIRS if str(pair) == args.pair]
    begun = time.perf_counter()
    with Pool(4) as pool:
        clean = outcome(pool, None, pair, LIMIT_S)
        if isinstance(clean, str) or clean.says:
            raise SystemExit(f"{pair} is not equal without a change: {clean}")
        found = outcome(pool, Mutant(**{name: row[name] for name in FIELDS}), pair, LIMIT_S)
    says = found if isinstance(found, str) else found.says
    kept = [one for one in rows_of(AGAIN) if one["key"] != args.key]
    seconds = time.perf_counter() - begun
    effect = pair.way if says else row["effect"]
    new = {"key": args.key, "effect": effect, "says": says, "pair": str(pair), "seconds": seconds}
    AGAIN.write_text("".join(json.dumps(one) + "\n" for one in [*kept, new]))
    print(f"{args.key} on {pair}: {says or 'nothing'}")


if __name__ == "__main__":
    main()
