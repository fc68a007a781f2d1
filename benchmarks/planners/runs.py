"""Runs: published training steps as plain data, which a driver gets as JSON. Read as weft's own
benchmark does."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import rows as published
from cells import flag, whole

SINGLE_NODE = "vtrain"
# Table 1 of SC'21 (2104.04473) and Table 5 of 2205.05198, but for the run named in its text alone
CLASSIC = "the 18"
LATER = "korthikanti2022_table5-0009"


@dataclass(frozen=True)
class Run:
    """`recompute`: none, selective (the core of attention) or full. `zero`: stage, 0 for replicas.
    `nic_bps`: bytes per second of one device between nodes, each way. `held`: no constant of weft
    is fitted to it. `time_s` is None for a layout that nobody ran."""

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
    held: bool = True
    time_s: float | None = None

    @property
    def group(self) -> tuple[object, ...]:
        """Runs of one group are layouts of one model on as many devices, with batches within some
        10 %."""
        return (
            self.source,
            self.layers,
            self.hidden,
            self.heads,
            self.devices,
            round(10 * math.log(self.batch)),
        )

    @property
    def layout(self) -> tuple[object, ...]:
        """What a planner chooses."""
        return (
            self.tp,
            self.cp,
            self.pp,
            self.chunks,
            self.dp,
            self.zero,
            self.sequence,
            self.microbatch,
        )


def read() -> list[Run]:
    """Those of every source that states all fields."""
    return [
        of_row(row) for row in published.own() if row["quality"] == "A" and row["d_iter_time_s"]
    ]


def classic(run: Run) -> bool:
    """Whether it is one of the 18."""
    return run.source in ("mlm_sc21_table1", "korthikanti2022_table5") and run.id != LATER


def grouped(runs: Iterable[Run]) -> dict[tuple[object, ...], list[Run]]:
    """By group."""
    found: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        found.setdefault(run.group, []).append(run)
    return found


def of_row(row: published.Row) -> Run:
    """A row of published runs, or of a layout written as they are."""

    def number(name: str, default: int) -> int:
        return whole(row, name, default)

    dims, tp, pp, cp = published.dims(row), number("tp", 1), number("pp", 1), number("cp", 1)
    devices, recompute = number("n_accel", 0), row.get("recompute") or "none"
    return Run(
        id=row["row_id"],
        source=row["source_id"],
        layers=dims.layers,
        hidden=dims.hidden,
        heads=dims.heads,
        kv_heads=dims.kv_heads,
        ffn=dims.ffn,
        gated=dims.gated,
        vocab=dims.vocab,
        seq_len=dims.seq_len,
        experts=max(1, dims.num_experts),
        accelerator=row.get("accelerator") or "A100-SXM4-80GB",
        devices=devices,
        dtype=re.split(r"[ (]", row.get("dtype") or "fp16")[0],
        flash="flash" in (row.get("attn_kernel") or ""),
        tp=tp,
        cp=cp,
        pp=pp,
        chunks=number("vp", 1),
        dp=number("dp", devices // (tp * pp * cp)),
        zero=int((row.get("zero_stage") or "0")[0]),
        sequence=bool(flag(row, "sp")),
        microbatch=number("mbs", 1),
        batch=number("gbs", 1),
        recompute="selective" if recompute == "selective(core attention)" else recompute,
        nic_bps=published.hardware(row).tiers[1].bps,
        held=published.held(row),
        time_s=float(row["d_iter_time_s"]) if row["d_iter_time_s"] else None,
    )
