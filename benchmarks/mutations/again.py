"""What verify says now of mutants that it had not seen, on one pair each.

    python benchmarks/mutations/again.py KEY "verify parts fsdp2.tp2" [KEY PAIR]...

Writes results/again.jsonl: of those in results/mutants.jsonl whose change the source still has.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE.parents[1]), str(HERE)]

from judge import outcome  # noqa: E402
from mutants import Mutant  # noqa: E402
from observed import Outcome  # noqa: E402
from subjects import PAIRS, Pair  # noqa: E402
from survivors import FIELDS, MUTANTS, rows_of  # noqa: E402

from weft.launch.local_workers import Pool  # noqa: E402

LIMIT_S = 300.0
AGAIN = HERE / "results" / "again.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mutants", nargs="+", metavar="KEY PAIR")
    given = parser.parse_args().mutants
    rows, clean = {row["key"]: row for row in rows_of(MUTANTS)}, dict[Pair, Outcome | str]()
    with Pool(4) as pool:
        for key, name in zip(given[::2], given[1::2], strict=True):
            (pair,) = [pair for pair in PAIRS if str(pair) == name]
            if pair not in clean:
                clean[pair] = outcome(pool, None, pair, LIMIT_S)
                if isinstance(alone := clean[pair], str) or alone.says:
                    raise SystemExit(f"{pair} is not equal without a change: {alone}")
            mutant = Mutant(**{field: rows[key][field] for field in FIELDS})
            found = outcome(pool, mutant, pair, LIMIT_S)
            says = found if isinstance(found, str) else found.says
            kept = [one for one in rows_of(AGAIN) if one["key"] != key]
            new = {"key": key, "effect": pair.way if says else "", "says": says, "pair": name}
            AGAIN.write_text("".join(json.dumps(one) + "\n" for one in [*kept, new]))
            print(f"{key} on {pair}: {says or 'nothing'}", flush=True)


if __name__ == "__main__":
    main()
