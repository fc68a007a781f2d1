"""Kernels: what a card's matmuls and attentions were measured to reach of its peak, one by one.
Half are held out."""

from __future__ import annotations

import csv
import math
import re
import zlib
from pathlib import Path
from statistics import median

from weft.planner.calibrate.robust_fit import fit_line

DATA = Path(__file__).parent / "data"


def ceiling(card: str, dtype: str = "bf16") -> float:
    """The share of the peak that the best of its matmuls in this dtype reaches."""
    with (DATA / "ceilings.csv").open(newline="", encoding="utf-8") as file:
        row = next(
            row
            for row in csv.DictReader(file)
            if (row["accelerator"], row["dtype"]) == (card, dtype)
        )
    return float(row["MAMF_TFLOPS"]) / float(row["theory_TFLOPS"])


def kernels(card: str) -> tuple[dict[str, float], float]:
    """What the card's kernels reach in bf16, whatever the software: constants of all its eras. And
    the median error of two of them, in the times of matmuls that they are not fitted to."""
    with (DATA / "kernels.csv").open(newline="", encoding="utf-8") as file:
        those = [row for row in csv.DictReader(file) if row["accelerator"] == card]
    fits, other = [], []
    for row in those:
        if row["op"] == "matmul":
            sizes = {
                name: int(size) for name, size in re.findall(r"\b([bmkn])=(\d+)", row["shape"])
            }
            flops = 2.0 * math.prod(sizes.values())
            one = flops, flops / float(row["efficiency"])  # and so long, where the peak is 1
            (other if zlib.crc32(row["shape"].encode()) & 1 else fits).append(one)
    found = fit_line(*zip(*fits, strict=True))
    errors = [abs((found.fixed_s + flops / found.rate) / took - 1) for flops, took in other]
    # of all FLOPs, half of which a causal attention leaves out
    ahead, back = (
        median(float(row["efficiency"]) for row in those if row["op"] == op) / 2
        for op in ("sdp_fwd", "sdp_bwd")
    )
    constants = {
        "matmul": found.rate,
        "matmul_flops": found.half,
        "attention": ahead,
        "attention_backward": back,
    }
    return constants, median(errors)
