"""A step of weft beside one of plain torch: both compiled, in bf16, fully sharded. Each side alone
on the devices, in turn."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from ours import Ours
from plain import Plain
from rounds import Ranks, in_rounds, slowest, timed
from setting import EIGHT, ONE, Setting, Size

from weft.launch import Pool

ROUNDS = (("plain", "weft"), ("weft", "plain"), ("plain", "weft"))
NEAR = 0.05  # losses of other draws of the same weights, relative


def steps(setting: Setting, size: Size, side: str) -> dict[str, Any]:
    """A rank's part of one side's steps."""
    setting.fresh()
    if side == "weft":
        trainer: Any = Ours(setting, size, setting.compiled())
    else:
        trainer = Plain(setting, size)
    rank = torch.distributed.get_rank()
    rows = size.rows(setting.world, setting.device)
    mine = {key: value.chunk(setting.world)[rank].clone() for key, value in rows.items()}
    del rows
    params = sum(p.numel() for p in size_on_meta(size).parameters())
    return {**timed(setting, lambda: trainer.step(mine)), "params": params}


def size_on_meta(size: Size) -> torch.nn.Module:
    with torch.device("meta"):
        return size.build()


def flops_of_token(size: Size, params: int) -> float:
    """As torchtitan counts: 6 for each weight of a matmul, and attention as if it saw all."""
    return 6 * (params - size.vocab * size.dim) + 12 * size.layers * size.dim * size.seq_len


def measure(setting: Setting) -> list[dict[str, Any]]:
    def run(pool: Pool, size: Size, side: str) -> Ranks:
        return pool.run(steps, setting, size, side, timeout=1500)

    rows = []
    for asked in (ONE,) if setting.small else (ONE, EIGHT):
        size, rounds = in_rounds(setting, setting.sized(asked), ROUNDS, run)
        rows.append(row_of(setting, size, rounds))
        print(rows[-1], flush=True)
    return rows


def row_of(setting: Setting, size: Size, rounds: list[dict[Any, Ranks]]) -> dict[str, Any]:
    """Of both sides: a step lasts until the slowest rank is done."""
    row: dict[str, Any] = {"size": vars(size), "world": setting.world}
    tokens = size.batch * size.seq_len
    peak = setting.sheet.peak("bf16") if setting.sheet is not None else None
    medians: dict[str, list[float]] = {}
    for side in ("plain", "weft"):
        per_round = [slowest(found[side]) for found in rounds]
        medians[side] = [median(times) for times in per_round]
        step_s, first = median(t for times in per_round for t in times), rounds[0][side][0]
        flops = tokens * flops_of_token(size, first["params"])
        row[side] = {
            "step_s": step_s,
            "rounds_s": medians[side],
            "tokens_per_s": tokens / step_s,  # of one device
            "mfu": flops / step_s / peak if peak else None,
            "peak_bytes": max(rank["peak"] for found in rounds for rank in found[side]),
            "losses": first["losses"],
        }
        row["params"] = first["params"]
    row["ratios"] = [ours / plain for ours, plain in zip(medians["weft"], medians["plain"])]
    row["ratio"] = median(row["ratios"])
    return row


def passed(row: dict[str, Any]) -> bool:
    """Both sides learn alike. How fast they are is no matter of right and wrong."""
    pairs = zip(row["weft"]["losses"], row["plain"]["losses"])
    return all(abs(ours / plain - 1) < NEAR for ours, plain in pairs)


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| decoder | side | step, s | weft / plain | tokens/s a device | MFU | peak, GB |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    for row in rows:
        size = row["size"]
        name = f"{size['name']}, {size['layers']} layers, {size['batch']} x {size['seq_len']}"
        for side in ("plain", "weft"):
            it = row[side]
            share = "-" if it["mfu"] is None else f"{it['mfu']:.1%}"
            ratio = "" if side == "plain" else f"{row['ratio']:.3f}"
            lines.append(
                f"| {name} | {side} | {it['step_s']:.3f} | {ratio} | {it['tokens_per_s']:,.0f} |"
                f" {share} | {it['peak_bytes'] / 1e9:.1f} |"
            )
        if not passed(row):
            lines += ["", "**The losses of both sides differ.**"]
    return lines
