"""A step of weft with linears in float8, by each of torchao's recipes, beside the same in bf16.
Each side alone on the devices, in turn."""

from __future__ import annotations

from statistics import median
from typing import Any

from ours import Ours
from rounds import Ranks, in_rounds, slowest, timed
from setting import EIGHT, ONE, Setting, Size
from speed import NEAR

from weft.core import RECIPES, Refusal
from weft.launch import Pool

SIDES = ("off", *RECIPES)
ROUNDS = (SIDES, SIDES[::-1], SIDES)


def steps(setting: Setting, size: Size, recipe: str) -> dict[str, Any]:
    """A rank's steps; or why the device, or what is installed, takes no such step."""
    setting.fresh()
    try:
        trainer = Ours(setting, size, setting.compiled(), float8=recipe)
    except Refusal as refusal:
        return {"refused": str(refusal)}
    return {**timed(setting, trainer.step), "graphs": graphs(trainer)}


def graphs(trainer: Ours) -> list[int]:
    """Graphs, breaks within blocks and recompilations."""
    counts = trainer.engine.compiled.counts
    return [counts.graphs, counts.breaks, counts.recompilations]


def measure(setting: Setting) -> list[dict[str, Any]]:
    def run(pool: Pool, size: Size, side: str) -> Ranks:
        return pool.run(steps, setting, size, side, timeout=1500)

    rows = []
    for asked in (ONE,) if setting.small else (ONE, EIGHT):
        size, rounds = in_rounds(setting, setting.sized(asked), ROUNDS, run)
        rows += [row_of(size, side, rounds) for side in SIDES]
        print(*rows[-len(SIDES) :], sep="\n", flush=True)
    return rows


def row_of(size: Size, side: str, rounds: list[dict[Any, Ranks]]) -> dict[str, Any]:
    """Of one side: a step lasts until the slowest rank is done."""
    row: dict[str, Any] = {"size": vars(size), "side": side}
    first, bf16 = rounds[0][side][0], rounds[0]["off"][0]
    if "refused" in first:
        return row | {"refused": first["refused"]}
    mine, other = ([median(slowest(found[it])) for found in rounds] for it in (side, "off"))
    return row | {
        "step_s": median(mine),
        "ratio": median(own / plain for own, plain in zip(mine, other)),
        "tokens_per_s": size.batch * size.seq_len / median(mine),  # of one device
        "peak_bytes": max(rank["peak"] for found in rounds for rank in found[side]),
        "losses": first["losses"],
        "bf16_losses": bf16["losses"],
        "graphs": first["graphs"],
    }


def passed(row: dict[str, Any]) -> bool:
    """It learns as bf16 does, in graphs without a break; or the device has no float8."""
    if "refused" in row:
        return row["side"] != "off"
    pairs = zip(row["losses"], row["bf16_losses"])
    return all(abs(own / plain - 1) < NEAR for own, plain in pairs) and row["graphs"][1] == 0


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| decoder | float8 | step, s | of bf16 | tokens/s a device | peak, GB |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: |"]
    for row in rows:
        size = row["size"]
        name = f"{size['name']}, {size['layers']} layers, {size['batch']} x {size['seq_len']}"
        if "refused" in row:
            lines.append(f"| {name} | {row['side']} | skipped: {row['refused']} | | | |")
            continue
        lines.append(
            f"| {name} | {row['side']} | {row['step_s']:.3f} | {row['ratio']:.3f} |"
            f" {row['tokens_per_s']:,.0f} | {row['peak_bytes'] / 1e9:.1f} |"
        )
    if not all(map(passed, rows)):
        lines += ["", "**A side does not learn as bf16 does, or its graphs break.**"]
    return lines
