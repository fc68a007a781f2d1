"""The rows: published training steps as one shape, whichever table they stand in. Imports only the standard library.

A row is a layout of a model on some devices and, where it was run, the seconds of a step. Drivers get rows as JSON.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

SINGLE_NODE = "vtrain_single_node"
CLASSIC = "the 18"  # Table 1 of SC'21 (2104.04473) and Table 5 of 2205.05198, but for the run named in its text alone
GPT2 = 50257  # words of its vocabulary, which the table does not state
LATER = {"korthikanti2022_table5-0009"}
NIC_BPS = {  # of one device, each way, where a source does not have 200 Gb/s for each
    "bloom_prequel": 4 * 100e9 / 8 / 8,
    "fms_fsdp": 400e9 / 8 / 8,
}


@dataclass(frozen=True)
class Row:
    """`recompute`: none, selective (the core of attention) or full. `zero`: stage, 0 for replicas. `nic_bps`: bytes per
    second of one device between nodes, each way. `time_s` is None for a layout that nobody ran."""

    id: str
    source: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    gated: bool
    vocab: int
    seq_len: int
    experts: int
    accelerator: str
    devices: int
    dtype: str
    flash: bool
    tp: int
    cp: int
    pp: int
    chunks: int
    dp: int
    zero: int
    sequence: bool
    microbatch: int
    batch: int
    recompute: str
    nic_bps: float
    time_s: float | None = None

    @property
    def group(self) -> tuple[object, ...]:
        """Rows of one group are layouts of one model on as many devices, with batches within some 10 %."""
        return self.source, self.layers, self.hidden, self.heads, self.devices, round(10 * math.log(self.batch))

    @property
    def layout(self) -> tuple[object, ...]:
        """What a planner chooses."""
        return self.tp, self.cp, self.pp, self.chunks, self.dp, self.zero, self.sequence, self.microbatch


def read(published: Path) -> list[Row]:
    """The rows of this folder of every source that states all fields, and that were run."""
    with (published / "training_runs.csv").open() as file:
        found = [_run(row) for row in csv.DictReader(file) if row["quality"] == "A" and row["d_iter_time_s"]]
    with (published / "vtrain_single_node.csv").open() as file:
        return found + [_single_node(row) for row in csv.DictReader(file)]


def classic(row: Row) -> bool:
    """Whether it is one of the 18."""
    return row.source in ("mlm_sc21_table1", "korthikanti2022_table5") and row.id not in LATER


def grouped(rows: Iterable[Row]) -> dict[tuple[object, ...], list[Row]]:
    """By group."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(row.group, []).append(row)
    return found


def _run(row: Mapping[str, str]) -> Row:
    def number(name: str, default: int) -> int:
        return int(row[name]) if row[name] else default

    heads, tp, pp, cp = int(row["heads"]), number("tp", 1), number("pp", 1), number("cp", 1)
    devices, recompute = int(row["n_accel"]), row["recompute"]
    return Row(
        id=row["row_id"], source=row["source_id"],
        layers=int(row["layers"]), hidden=int(row["hidden"]), heads=heads, kv_heads=number("kv_heads", heads),
        ffn=number("ffn", 4 * int(row["hidden"])), gated=row["gated_mlp"] == "Y",
        vocab=int(row["vocab"]), seq_len=int(row["seq_len"]), experts=number("n_experts", 1),
        accelerator=row["accelerator"], devices=devices,
        dtype=re.split(r"[ (]", row["dtype"])[0], flash=not row["attn_kernel"].startswith("unfused"),
        tp=tp, cp=cp, pp=pp, chunks=number("vp", 1), dp=number("dp", devices // (tp * pp * cp)),
        zero=int(re.match(r"\d?", row["zero_stage"])[0] or 0),  # type: ignore[index]
        sequence=row["sp"].startswith("Y"),
        microbatch=int(row["mbs"]), batch=int(row["gbs"]),
        recompute="selective" if recompute == "selective(core attention)" else recompute,
        nic_bps=NIC_BPS.get(row["source_id"], 25e9 if "A100" in row["accelerator"] else 50e9),
        time_s=float(row["d_iter_time_s"]),
    )  # fmt: skip


def _single_node(row: Mapping[str, str]) -> Row:
    hidden, heads = int(row["hidden"]), int(row["heads"])
    return Row(
        id=row["row_id"], source=SINGLE_NODE,
        layers=int(row["layers"]), hidden=hidden, heads=heads, kv_heads=heads, ffn=4 * hidden, gated=False,
        vocab=GPT2, seq_len=int(row["seq_len"]), experts=1,
        accelerator="A100-SXM4-80GB", devices=int(row["n_accel"]), dtype="fp16", flash=False,
        tp=int(row["tp"]), cp=1, pp=int(row["pp"]), chunks=1, dp=int(row["dp"]), zero=0, sequence=False,
        microbatch=int(row["mbs"]), batch=int(row["gbs"]), recompute="none", nic_bps=25e9,
        time_s=float(row["iter_time_s"]),
    )  # fmt: skip
