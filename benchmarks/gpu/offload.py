"""A step with activations on the device and in the host's memory: seconds, memory, and the loss."""

from __future__ import annotations

from statistics import median
from typing import Any

from memory import predicted, run_of
from ours import Ours
from rounds import Ranks, in_rounds, slowest, timed
from setting import ONE, Setting, Size

from weft.launch import Pool

ROUNDS = ((False, True), (True, False), (False, True))  # offloaded or not: in turn
NEAR = 1e-6  # of losses: copies change no bit, but sums over ranks may come in another order


def cases(setting: Setting) -> list[tuple[str, bool]]:
    """What is computed again; compiled or not."""
    found = [("none", True), ("selective", True), ("full", True), ("none", False)]
    return found[:1] if setting.small else found


def steps(
    setting: Setting, size: Size, recompute: str, compiled: bool, away: bool
) -> dict[str, Any]:
    """A rank's part."""
    setting.fresh()
    layout, how = f"fsdp{setting.world}", setting.compiled() if compiled else "off"
    # on the CPU there is no host beside the device: all of it runs, but for the copies
    trainer = Ours(setting, size, how, layout, recompute, away and not setting.small)
    return timed(setting, trainer.step)


def measure(setting: Setting) -> list[dict[str, Any]]:
    rows = []
    for recompute, compiled in cases(setting):

        def run(pool: Pool, each: Size, away: bool, how: Any = (recompute, compiled)) -> Ranks:
            return pool.run(steps, setting, each, *how, away, timeout=900)

        size, rounds = in_rounds(setting, setting.sized(ONE), ROUNDS, run)
        row: dict[str, Any] = {"size": vars(size), "recompute": recompute, "compiled": compiled}
        for away, side in ((False, "device"), (True, "host")):
            said = predicted(
                run_of(setting, size, f"fsdp{setting.world}", recompute, away), setting, compiled
            )
            row[side] = {
                "rounds_s": [median(slowest(found[away])) for found in rounds],
                "peak_bytes": max(rank["peak"] for found in rounds for rank in found[away]),
                "predicted_bytes": said["peak"] if said else None,
                "losses": rounds[0][away][0]["losses"],
            }
        pairs = zip(row["host"]["rounds_s"], row["device"]["rounds_s"])
        row["ratio"] = median(host / device for host, device in pairs)
        rows.append(row)
        print(row, flush=True)
    return rows


def passed(row: dict[str, Any]) -> bool:
    """The same losses: a copy that is read too early would change them."""
    pairs = zip(row["host"]["losses"], row["device"]["losses"])
    return all(abs(host / device - 1) < NEAR for host, device in pairs)


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| decoder | computed again | compiled | activations | step, s | host / device |"]
    lines[0] += " peak, GB | predicted |"
    lines += ["| --- | --- | --- | --- | ---: | ---: | ---: | ---: |"]
    for row in rows:
        size = row["size"]
        name = f"{size['name']}, {size['layers']} layers, {size['batch']} x {size['seq_len']}"
        for side in ("device", "host"):
            it, how = row[side], "yes" if row["compiled"] else "no"
            said = f"{it['predicted_bytes'] / 1e9:.2f}" if it["predicted_bytes"] else "-"
            ratio = f"{row['ratio']:.3f}" if side == "host" else ""
            lines.append(
                f"| {name} | {row['recompute']} | {how} | {side} | {median(it['rounds_s']):.3f} |"
                f" {ratio} | {it['peak_bytes'] / 1e9:.2f} | {said} |"
            )
        if not passed(row):
            lines += ["", "**The losses of both differ.**"]
    return lines
