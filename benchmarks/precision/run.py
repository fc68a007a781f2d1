"""Loss curves and bytes of bf16 beside float32.

python benchmarks/precision/run.py          # both parts: about 3 minutes on 2 cores
python benchmarks/precision/run.py bytes
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from parts import Results, measure, parser  # noqa: E402

import weft  # noqa: E402
from weft.engine import Audit  # noqa: E402
from weft.launch import run_workers  # noqa: E402
from weft.losses import next_token  # noqa: E402
from weft.models import decoder  # noqa: E402
from weft.train import collate, stdlib  # noqa: E402

STEPS, WINDOW, BATCH, LENGTH = 500, 25, 8, 64
SEEDS = range(6)
build = partial(decoder, dim=64, layers=2, heads=4, seq_len=LENGTH)
LOW = [  # (layout, precision, dtype of sums)
    ("dp1", "bf16", "fp32"),
    ("dp2", "bf16", "fp32"),
    ("dp2", "bf16", "bf16"),
    ("fsdp2", "bf16", "fp32"),
    ("fsdp2", "bf16", "bf16"),
    ("tp2+sequence", "bf16", "fp32"),
    ("dp1", "fp16", "fp32"),
]
LAYOUTS = ["dp2", "fsdp2", "fsdp2+zero1", "tp2+sequence", "cp2"]


def curve(layout: str, precision: str, reduce: str, seed: int) -> list[float]:
    """Mean loss of each window of steps. The seed draws weights and batches, the same for all."""
    engine, data = _engine(layout, precision, reduce, seed), stdlib(LENGTH)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()
    losses = []
    for step in range(STEPS):
        batch = collate([data[i] for i in order[step * BATCH : (step + 1) * BATCH]])
        result = engine.step(engine.local(batch))
        while result.skipped:  # fp16 looks for its scale: the same batch again
            result = engine.step(engine.local(batch))
        losses.append(float(result.loss))
    return torch.tensor(losses).view(-1, WINDOW).mean(1).tolist()


def _engine(layout: str, precision: str, reduce: str, seed: int) -> weft.Engine:
    torch.manual_seed(seed)
    model, adamw = build(), partial(torch.optim.AdamW, lr=1e-3)
    given: dict[str, Any] = {"loss": next_token, "precision": precision, "reduce": reduce}
    plan = weft.plan(model, layout, batch=BATCH, **given)
    return weft.Engine(model, plan, optimizer=adamw, loss=next_token, clip=1.0, device="cpu")


def curves() -> dict[str, Any]:
    """Float32 with each seed; then bf16 and fp16 with seed 0, on layouts."""
    full = []
    for seed in SEEDS:
        full += run_workers(curve, 1, "dp1", "fp32", "fp32", seed, threads=1)
        print(f"fp32, seed {seed}: {full[-1][-1]:.4f}", flush=True)
    spread = [max(each) - min(each) for each in zip(*full, strict=True)]
    rows = []
    for layout, precision, reduce in LOW:
        world = weft.Layout.parse(layout).world
        low = run_workers(curve, world, layout, precision, reduce, 0, threads=1)[0]
        apart = [abs(a - b) for a, b in zip(low, full[0], strict=True)]
        share = max(a / b for a, b in zip(apart, spread, strict=True))
        row = {"layout": layout, "precision": precision, "reduce": reduce}
        rows.append(row | {"curve": low, "apart": max(apart), "share": share})
        print(row, f"{low[-1]:.4f}, {share:.3f} of the spread", flush=True)
    return {"fp32": full, "spread": spread, "rows": rows}


def seen(layout: str, precision: str, reduce: str) -> dict[str, int]:
    """Bytes of a step's collectives by kind."""
    engine = _engine(layout, precision, reduce, 0)
    batch = collate([stdlib(LENGTH)[i] for i in range(BATCH)])
    with Audit(engine.mesh) as audit:
        engine.step(engine.local(batch))
    found: dict[str, int] = {}
    for comm in audit.seen:
        found[comm.kind] = found.get(comm.kind, 0) + comm.nbytes
    return found


def sent() -> list[dict[str, Any]]:
    """Of each layout, in float32, and in bf16 with both kinds of sums."""
    rows = []
    for layout in LAYOUTS:
        for precision, reduce in (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")):
            (found, *_) = run_workers(seen, 2, layout, precision, reduce, threads=1)
            rows.append({"layout": layout, "precision": precision, "reduce": reduce} | found)
    return rows


def tables(results: Results) -> tuple[list[str], bool]:
    lines, held = [], True
    if "curves" in results:
        found = results["curves"]["runs"]
        first, last = found["spread"][0], found["spread"][-1]
        lines += [
            f"Spread of {len(found['fp32'])} seeds in float32: {first:.4f} in the first window,"
            f" {last:.4f} in the last.",
            "",
            "| layout | compute | sums | loss, last window | most apart from float32 | share of the"
            " spread, worst window | within |",
            "| --- | --- | --- | ---: | ---: | ---: | --- |",
        ]
        for row in found["rows"]:
            within = row["share"] < 1
            held &= within
            lines.append(
                f"| {row['layout']} | {row['precision']} | {row['reduce']} |"
                f" {row['curve'][-1]:.4f} | {row['apart']:.4f} | {row['share']:.3f} |"
                f" {'yes' if within else 'NO'} |"
            )
        lines.append("")
    if "bytes" in results:
        kinds = ("all_gather", "reduce_scatter", "all_reduce", "send")
        rows = results["bytes"]["runs"]
        lines += [
            "| layout | compute | sums | " + " | ".join(kinds) + " |",
            "| --- | --- | --- |" + " ---: |" * len(kinds),
        ]
        full = {row["layout"]: row for row in rows if row["precision"] == "fp32"}
        for row in rows:
            cells = []
            for kind in kinds:
                whole = full[row["layout"]].get(kind, 0)
                cells.append(f"{row.get(kind, 0) / whole:.3f}" if whole else "")
            name = f"| {row['layout']} | {row['precision']} | {row['reduce']} |"
            lines.append(f"{name} {' | '.join(cells)} |")
    return lines, held


if __name__ == "__main__":
    parts = {"curves": curves, "bytes": sent}
    asked = parser(__doc__, parts).parse_args()
    raise SystemExit(measure(HERE, asked.parts, parts, tables))
