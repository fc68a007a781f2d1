"""A sequence that ranks share: attention by each method beside one process, and the memory of a
training step.

    python benchmarks/context/run.py  # all of it: about 40 minutes on 2 cores, idle
    python benchmarks/context/run.py attention --lengths 1024 4096
    python benchmarks/context/run.py memory longest

Each part writes results/PART.json, then the tables in README.md are written anew. Exit code 1 if a
target is missed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import parts  # noqa: E402
import worker  # noqa: E402

from weft.core.layout import Layout  # noqa: E402
from weft.launch.local_workers import run_workers  # noqa: E402

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
METHODS = ("cp2", "cp2+gather", "cp2+ulysses", "cp4", "cp4+gather", "cp4+ulysses", "cp2.ulysses2")
SIZE = {"vocab": 256, "dim": 128, "layers": 4, "heads": 8}
LARGE = {"vocab": 256, "dim": 512, "layers": 8, "heads": 8}
AT = 4096  # positions, of the memory at one length
GIB = 2**30
LIMIT = 4 * GIB  # of a rank, for the longest sequence
BALANCE, SHARE = (
    1.05,
    0.30,
)  # asked: work of the busiest rank over the mean's; memory at cp4 over that at cp1


def attention(lengths: list[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for length in lengths:
        repeats = 1 if length > 8192 else 3
        each = found[str(length)] = {
            "dp1": {"seconds": median(run_workers(worker.whole, 1, length, repeats)[0])}
        }
        for layout in METHODS:
            ranks = run_workers(worker.shared, Layout.parse(layout).world, layout, length, repeats)
            each[layout] = {
                "seconds": max(median(rank["seconds"]) for rank in ranks),
                "pairs": [rank["pairs"] for rank in ranks],
                "sent": [rank["sent"] for rank in ranks],
            }
        print(length, {name: round(one["seconds"], 3) for name, one in each.items()}, flush=True)
    return found


def memory() -> dict[str, Any]:
    found = {}
    for layout in ("dp1", *METHODS):
        ranks = run_workers(worker.trained, Layout.parse(layout).world, layout, AT, SIZE)
        found[layout] = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
        print(layout, found[layout], flush=True)
    return found


def longest() -> dict[str, Any]:
    """By a line through two shorter ones, then tried, and less by an eighth until it fits."""
    found = {}
    for layout in ("dp1", "cp2"):
        world = Layout.parse(layout).world
        most = {
            n: max(r["process"] for r in run_workers(worker.trained, world, layout, n, LARGE))
            for n in (1024, 3072)
        }
        slope = (most[3072] - most[1024]) / 2048
        length = int((LIMIT - most[1024]) / slope + 1024) // 64 * 64
        while True:
            ranks = run_workers(worker.trained, world, layout, length, LARGE)
            took = max(rank["process"] for rank in ranks)
            print(layout, length, took / GIB, flush=True)
            if took <= LIMIT:
                break
            length = length * 7 // 8 // 64 * 64
        found[layout] = {
            "length": length,
            "process": took,
            "seconds": max(rank["seconds"] for rank in ranks),
        }
    return found


def formula(layout: str, length: int) -> dict[str, int]:
    """Bytes that a rank's calls of forward and backward hand to collectives, float32 (COST: Liu et
    al. 2023; Jacobs et al. 2023): a ring sends keys and values size - 1 times each way, and their
    gradients size times."""
    parsed, item = Layout.parse(layout), 4
    method = (parsed.options_of("cp") or ("ring",))[0]
    ring = parsed.size("cp") if method != "ulysses" else 1
    up = parsed.size("ulysses") * (parsed.size("cp") if method == "ulysses" else 1)
    kv, positions, sent = worker.KV_HEADS, length // (ring * up), {}
    if up > 1:
        kv = max(kv, up)
        sent["all_to_all"] = 2 * (2 * worker.HEADS + 2 * kv) * positions * worker.WIDTH * item
        kv, positions = kv // up, positions * up
    own = 2 * kv * positions * worker.WIDTH * item
    if ring > 1 and method == "gather":
        sent |= {"all_gather": 2 * own * ring, "reduce_scatter": own * ring}
    elif ring > 1:
        sent["send"] = own * (2 * (ring - 1) + ring)
    return sent


def tables(results: dict[str, dict[str, Any]]) -> tuple[list[str], bool]:
    held, lines = True, []
    if rows := results.get("attention", {}).get("runs"):
        lines += ["### Attention, forward and backward", ""]
        lines += ["| tokens | one process, s | " + " | ".join(f"{m}, s" for m in METHODS) + " |"]
        lines += ["| ---: |" + " ---: |" * (len(METHODS) + 1)]
        for length, each in rows.items():
            cells = [f"{each[name]['seconds']:.3f}" for name in ("dp1", *METHODS)]
            lines.append(f"| {int(length):,} | " + " | ".join(cells) + " |")
        lines += [
            "",
            (
                "| layout | work of the busiest rank / mean | bytes: as the formula | at the most"
                " tokens |"
            ),
            "| --- | ---: | --- | --- |",
        ]
        for layout in METHODS:
            worst = max(
                max(e[layout]["pairs"]) * len(e[layout]["pairs"]) / sum(e[layout]["pairs"])
                for e in rows.values()
            )
            exact = all(
                sent == formula(layout, int(n))
                for n, e in rows.items()
                for sent in e[layout]["sent"]
            )
            held &= worst <= BALANCE and exact
            last = max(map(int, rows))
            sums = ", ".join(
                f"{kind} {n:,} B" for kind, n in rows[str(last)][layout]["sent"][0].items()
            )
            verdict = "holds" if worst <= BALANCE else "FAIL"
            lines.append(
                f"| {layout} | {worst:.4f} {verdict} | {'holds' if exact else 'FAIL'} | {sums} |"
            )
        lines.append("")
    if rows := results.get("memory", {}).get("runs"):
        lines += [f"### Memory of a training step of {AT:,} tokens", ""]
        lines += [
            (
                "| layout | activations of a rank, MB | of one device's | process grew by, MB | of"
                " one device's | |"
            ),
            "| --- | ---: | ---: | ---: | ---: | --- |",
        ]
        alone = rows["dp1"]
        for layout, one in rows.items():
            share, grown = one["activations"] / alone["activations"], one["grown"] / alone["grown"]
            asked = Layout.parse(layout).world == 4
            verdict = ("holds" if share <= SHARE else "FAIL") if asked else ""
            held &= verdict != "FAIL"
            lines.append(
                f"| {layout} | {one['activations'] / 1e6:.1f} | {share:.0%} |"
                f" {one['grown'] / 1e6:.1f} | {grown:.0%} | {verdict} |"
            )
        lines.append("")
    if rows := results.get("longest", {}).get("runs"):
        lines += [f"### Longest sequence in {LIMIT // GIB} GiB a rank", ""]
        lines += [
            "| layout | tokens | memory of a rank, GiB | s a step |",
            "| --- | ---: | ---: | ---: |",
        ]
        for layout, one in rows.items():
            lines.append(
                f"| {layout} | {one['length']:,} | {one['process'] / GIB:.2f} |"
                f" {one['seconds']:.0f} |"
            )
        lines.append("")
    return lines, held


def main() -> int:
    measured = {
        "attention": lambda: attention(options.lengths),
        "memory": memory,
        "longest": longest,
    }
    parser = parts.parser(__doc__, measured)
    parser.add_argument("--lengths", nargs="+", type=int, default=[*LENGTHS])
    options = parser.parse_args()
    return parts.measure(HERE, options.parts, measured, tables)


if __name__ == "__main__":
    sys.exit(main())
