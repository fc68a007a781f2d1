"""weft's ring beside gloo's all-reduce, plain TCP, and all traffic through one rank, on links of
one rate.

    python benchmarks/ring/run.py                                   some 10 minutes on 2 idle cores
    python benchmarks/ring/run.py --ranks 4 --rates 100 --sizes 1048576

Adds to results/ring.json, then writes the table in README.md anew. Exit code 1 if the ring misses a
target.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import testbed  # noqa: E402
import torch  # noqa: E402

RESULTS, README = HERE / "results" / "ring.json", HERE / "README.md"
BEGIN, END = "<!-- results: written by run.py -->", "<!-- end of results -->"
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26)  # bytes
RATES = (1000.0, 100.0)  # Mbit/s
LARGE = 1 << 22  # bytes from which a link's rate is what counts
SHARE = 0.95  # of what a plain TCP stream gets through
LONGEST_S = 12.0  # no tensor is summed that takes a ring longer


def measured(ranks: int, rate: float, sizes: list[int]) -> list[dict[str, Any]]:
    testbed.limit(ranks, rate)
    sizes = [size for size in sizes if ideal_s(ranks, rate, size) <= LONGEST_S]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.json"
        command = [
            sys.executable,
            str(HERE / "worker.py"),
            str(rate),
            str(output),
            *map(str, sizes),
        ]
        elsewhere = testbed.run(ranks, command, timeout_s=900)
        rows = json.loads(output.read_text())
        return [{"ranks": ranks, "rate": rate, "elsewhere": elsewhere, **row} for row in rows]


def ideal_s(ranks: int, rate: float, nbytes: int) -> float:
    """Seconds of the bytes of a ring on a link that has no headers."""
    return 2 * (ranks - 1) / ranks * nbytes * 8 / (rate * 1e6)


def exact(row: dict[str, Any]) -> bool:
    """Whether each rank has sent 2 (N - 1) / N of the tensor, as far as elements of 4 bytes can be
    cut."""
    want = 2 * (row["ranks"] - 1) / row["ranks"] * row["bytes"]
    return all(abs(sent - want) < 2 * 4 for sent in row["messages"])


def table(rows: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """In Markdown; whether all targets are met."""
    lines = [
        (
            "| ranks | Mbit/s | bytes | sent / bytes: ring | central | TCP, s | ring, s | gloo, s |"
            " central, s | ring: of the rate | headers counted | of TCP | gloo: of TCP | |"
        ),
        "| ---: |" + " ---: |" * 12 + " --- |",
    ]
    found: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        found.setdefault((row["ranks"], row["rate"], row["bytes"]), {})[row["way"]] = row
    held = True
    for (ranks, rate, nbytes), ways in sorted(found.items()):
        ring, tcp, gloo, central = (ways.get(way) for way in ("ring", "tcp", "gloo", "central"))
        assert ring and tcp and gloo
        verdict = exact(ring) and (nbytes < LARGE or tcp["s"] / ring["s"] >= SHARE)
        held &= verdict
        cells = [f"{max(ring['messages']) / nbytes:.3f}"]
        cells.append(f"{max(central['messages']) / nbytes:.0f}" if central else "")
        cells += [f"{way['s']:.4f}" if way else "" for way in (tcp, ring, gloo, central)]
        cells.append(f"{ideal_s(ranks, rate, nbytes) / ring['s']:.1%}")
        cells.append(f"{max(ring['left']) * 8 / (rate * 1e6) / ring['s']:.1%}")
        cells += [f"{tcp['s'] / way['s']:.1%}" for way in (ring, gloo)]
        cells.append("holds" if verdict else "FAIL")
        lines.append(f"| {ranks} | {rate:g} | {nbytes:,} | " + " | ".join(cells) + " |")
    return lines, held


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--rates", nargs="+", type=float, default=[*RATES], help="Mbit/s")
    parser.add_argument("--sizes", nargs="+", type=int, default=[*SIZES], help="bytes")
    options = parser.parse_args()
    missing = testbed.lacking()
    if missing is not None:
        print(f"skipped: {missing}")
        return 0
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    for ranks in options.ranks:
        with testbed.hosts(ranks):
            for rate in options.rates:
                fresh = measured(ranks, rate, options.sizes)
                command = f"python benchmarks/ring/run.py {' '.join(sys.argv[1:])}".strip()
                for row in fresh:
                    row["command"] = command
                print("\n".join(table(fresh)[0]), flush=True)
                new = {(row["ranks"], row["rate"], row["bytes"]) for row in fresh}
                kept = [
                    row
                    for row in results["rows"]
                    if (row["ranks"], row["rate"], row["bytes"]) not in new
                ]
                results["rows"] = kept + fresh
                results["environment"] = {
                    "cpus": os.cpu_count(),
                    "machine": platform.machine(),
                    "system": platform.system(),
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                }
                RESULTS.parent.mkdir(exist_ok=True)
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    lines, held = table(results["rows"])
    text = README.read_text(encoding="utf-8")
    head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    README.write_text("\n".join([head, "", *lines, "", tail]), encoding="utf-8")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
