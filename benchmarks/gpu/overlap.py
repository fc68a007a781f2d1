"""A step under tp+sequence whose collectives are overlapped with matmuls (async_tp), beside one
that waits for them: each alone on the devices, in turn."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from ours import Ours
from rounds import slowest, timed
from setting import ONE, Setting, Size

from weft.core import Refusal

SIDES = ("waiting", "overlapped")
ROUNDS = (SIDES, SIDES[::-1], SIDES)
NEAR = 0.01  # losses from the same weights in bf16, relative


def steps(setting: Setting, size: Size, side: str) -> dict[str, Any]:
    """A rank's part of one side's steps."""
    setting.fresh()
    how = setting.compiled(async_tp=side == "overlapped")
    trainer = Ours(setting, size, how, layout=f"tp{setting.world}+sequence")
    found = timed(setting, trainer.step)
    with torch.profiler.profile() as seen:
        trainer.step()
        setting.wait()
    fused = sum(e.count for e in seen.key_averages() if e.key.startswith("symm_mem::fused"))
    trainer.engine.close()
    return {**found, "fused": fused}


def measure(setting: Setting) -> list[dict[str, Any]]:
    """One row for each side. One GPU has no tp."""
    if setting.world == 1:
        return []
    size, medians = setting.sized(ONE), {side: list[float]() for side in SIDES}
    rows = {side: {"side": side, "size": vars(size), "world": setting.world} for side in SIDES}
    with setting.pool() as pool:
        for sides in ROUNDS[:1] if setting.small else ROUNDS:
            for side in sides:
                try:
                    ranks = pool.run(steps, setting, size, side, timeout=1500)
                except Refusal as refusal:
                    rows[side]["refused"] = str(refusal)
                    continue
                medians[side].append(median(slowest(ranks)))
                found = {"step_s": median(medians[side]), "rounds_s": medians[side]}
                peak = max(rank["peak"] for rank in ranks)
                same = {name: ranks[0][name] for name in ("losses", "fused")}
                rows[side] |= found | same | {"peak_bytes": peak}
            print(rows, flush=True)
    waiting, overlapped = (rows[side] for side in SIDES)
    if "refused" not in overlapped:
        pairs = zip(medians["overlapped"], medians["waiting"])
        overlapped["ratio"] = median(ours / other for ours, other in pairs)
        pairs = zip(overlapped["losses"], waiting["losses"])
        overlapped["apart"] = max(abs(ours / other - 1) for ours, other in pairs)
    return list(rows.values())


def passed(row: dict[str, Any]) -> bool:
    """Something was fused where it was asked for, and both sides learn alike."""
    if row["side"] == "waiting" or "refused" in row:
        return row.get("fused", 0) == 0
    return row["fused"] > 0 and row["apart"] < NEAR


def table(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return ["One GPU has no tp."]
    lines = ["| side | step, s | overlapped / waiting | fused operators a step | peak, GB | |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | --- |"]
    for row in rows:
        if "refused" in row:
            lines.append(f"| {row['side']} | | | | | refused |")
            continue
        ratio = f"{row['ratio']:.3f}" if "ratio" in row else ""
        says = "" if passed(row) else "**failed**"
        lines.append(
            f"| {row['side']} | {row['step_s']:.3f} | {ratio} | {row['fused']} |"
            f" {row['peak_bytes'] / 1e9:.1f} | {says} |"
        )
    return lines
