"""weft's ring beside gloo's all-reduce, and beside all traffic through one rank, on hosts with links of one rate.

    python benchmarks/ring/run.py                                   some 10 minutes on 2 cores
    python benchmarks/ring/run.py --ranks 4 --rates 100 --sizes 1048576
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import testbed  # noqa: E402

RESULTS, README = HERE / "results" / "ring.json", HERE / "README.md"
BEGIN, END = "<!-- results: written by run.py -->", "<!-- end of results -->"
SIZES = (1024, 65536, 1 << 20, 1 << 24, 1 << 26)
RATES = (1000.0, 100.0)
LARGE = 1 << 22  # bytes from which a link's rate is what counts
OVERHEAD = 1.06  # bytes on the link for each byte of a message: headers, and acknowledgements of what came


def measured(ranks: int, rate: float, sizes: list[int], repeats: int) -> list[dict]:
    testbed.limit(ranks, rate)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.json"
        command = [sys.executable, str(HERE / "worker.py"), str(rate), str(output), *map(str, sizes)]
        testbed.run(ranks, command, timeout_s=900)
        rows = json.loads(output.read_text())
    for row in rows:
        row |= {"ranks": ranks, "rate": rate, "ideal_s": 2 * (ranks - 1) / ranks * row["bytes"] * 8 / (rate * 1e6)}
    return rows


def held(row: dict) -> bool | None:
    """What is asked of the ring: each rank's bytes, and the link's speed for large tensors."""
    if row["way"] != "ring" or row["bytes"] < LARGE:
        return None
    want = 2 * (row["ranks"] - 1) / row["ranks"] * row["bytes"]
    right = all(want <= sent <= OVERHEAD * want for sent in row["sent_bytes"])
    return right and (row["rate"] > 100 or row["ideal_s"] / row["s"] >= 0.95)


def table(rows: list[dict]) -> list[str]:
    lines = [
        "| ranks | Mbit/s | bytes | ring, s | of link speed | gloo, s | of link speed | central, s | most sent by a rank / bytes: ring | gloo | central | held |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]  # fmt: skip
    found: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        found.setdefault((row["ranks"], row["rate"], row["bytes"]), {})[row["way"]] = row
    for (ranks, rate, nbytes), ways in sorted(found.items()):
        cells = [str(ranks), f"{rate:g}", f"{nbytes:,}"]
        for way in ("ring", "gloo", "central"):
            cells.append(f"{ways[way]['s']:.4f}")
            if way != "central":
                cells.append(f"{ways[way]['ideal_s'] / ways[way]['s']:.1%}")
        cells += [f"{max(ways[way]['sent_bytes']) / nbytes:.2f}" for way in ("ring", "gloo", "central")]
        verdict = held(ways["ring"])
        cells.append("" if verdict is None else "yes" if verdict else "FAIL")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    arguments.add_argument("--rates", nargs="+", type=float, default=[*RATES], help="Mbit/s")
    arguments.add_argument("--sizes", nargs="+", type=int, default=[*SIZES], help="bytes")
    arguments.add_argument("--repeats", type=int, default=3)
    options = arguments.parse_args()
    missing = testbed.lacking()
    if missing is not None:
        print(f"skipped: {missing}")
        return 0
    rows = []
    for ranks in options.ranks:
        with testbed.hosts(ranks):
            for rate in options.rates:
                rows += measured(ranks, rate, options.sizes, options.repeats)
                print("\n".join(table(rows)[-len(options.sizes) :]), flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    text = README.read_text(encoding="utf-8")
    head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    README.write_text("\n".join([head, "", *table(rows), "", tail]), encoding="utf-8")
    return 0 if all(held(row) is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
