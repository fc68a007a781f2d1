"""The most memory that a rank's tensors take in a step, beside what `weft plan` predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from ours import Ours
from rounds import with_room
from setting import ONE, Setting, Size
from torch import Tensor

from weft.core import RunConfig, load_run
from weft.planner.cost.estimate import estimate
from weft.planner.cost.hardware import Cluster
from weft.planner.search.query_from_run import query_from_run
from weft.train import peak_memory_bytes

FILE = Path(__file__).parent / "decoder.toml"
WARMUP = 3


class Tokens:
    """Samples of `seq_len` tokens, of which the planner looks at the shapes."""

    def __init__(self, seq_len: int):
        self.seq_len = seq_len

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.zeros(self.seq_len, dtype=torch.int64)
        return {"input_ids": ids}


def cases(setting: Setting) -> list[tuple[str, str, bool]]:
    """Layout, what is computed again, compiled or not."""
    n = setting.world
    found = [(f"fsdp{n}", how, True) for how in ("none", "selective", "full")]
    found += [(f"fsdp{n}", "none", False)]
    if n > 1:
        found += [(f"dp{n}", "none", True), (f"tp{n}+sequence", "none", True)]
    return found[1:2] if setting.small else found


def run_of(
    setting: Setting, size: Size, layout: str, recompute: str, away: bool = False
) -> RunConfig:
    """As `weft plan` would have it."""
    sizes = {f"model.{key}": str(value) for key, value in size.model.items()}
    rest = {"data.seq_len": size.seq_len, "train.batch": size.batch * setting.world}
    words = {"layout.axes": f'"{layout}"', "train.recompute": f'"{recompute}"'}
    words["train.offload_activations"] = str(away).lower()
    return load_run(FILE, sizes | words | {key: str(value) for key, value in rest.items()})


def predicted(run: RunConfig, setting: Setting, compiled: bool) -> dict[str, float] | None:
    """Bytes by part, by the sheet of this device; None: there is none."""
    sheet = setting.sheet
    if sheet is None:
        return None
    era = sheet.era("compiled" if compiled and "compiled" in sheet.eras else "eager")
    asked = query_from_run(run, device=sheet.kind)
    cluster = Cluster.of(sheet, setting.world)
    made = estimate(asked.work, asked.choices, cluster, era, asked.practice, asked.sync)
    return {str(part.name): float(part.value[0]) for part in made.memory} | {
        "peak": float(made.peak_bytes[0])
    }


def held(setting: Setting, size: Size, layout: str, recompute: str, compiled: bool) -> list[int]:
    """Bytes of a rank: before, with weights alone, after a step, at the peak of one."""
    setting.fresh()
    found = [allocated(setting)]
    trainer = Ours(setting, size, setting.compiled() if compiled else "off", layout, recompute)
    found.append(allocated(setting))
    for _ in range(WARMUP):
        trainer.step()
    found.append(allocated(setting))
    if not setting.small:
        torch.cuda.reset_peak_memory_stats()
    trainer.step()
    setting.wait()
    return [*found, peak_memory_bytes(setting.device)]


def allocated(setting: Setting) -> int:
    return 0 if setting.small else torch.cuda.memory_allocated()


def measure(setting: Setting) -> list[dict[str, Any]]:
    rows = []
    for layout, recompute, compiled in cases(setting):
        case = (layout, recompute, compiled)
        with setting.pool() as pool:
            size, ranks = with_room(
                setting.sized(ONE),
                lambda each, pool=pool, case=case: pool.run(
                    held, setting, each, *case, timeout=900
                ),
            )
        row: dict[str, Any] = {"size": vars(size), "layout": layout, "recompute": recompute}
        row |= {"compiled": compiled, "ranks": ranks, "peak_bytes": max(r[-1] for r in ranks)}
        row["predicted"] = predicted(run_of(setting, size, layout, recompute), setting, compiled)
        rows.append(row)
        print(row, flush=True)
    return rows


def passed(row: dict[str, Any]) -> bool:
    return True  # a prediction is no promise


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| decoder, layout | computed again | compiled | peak, GB | predicted | ratio |"]
    lines += ["| --- | --- | --- | ---: | ---: | ---: |"]
    for row in rows:
        peak, said = row["peak_bytes"], "- | -"
        if row["predicted"]:
            wanted = row["predicted"]["peak"]
            said = f"{wanted / 1e9:.2f} | {wanted / peak:.2f}"
        size, how = row["size"], "yes" if row["compiled"] else "no"
        name = f"{size['name']}, {size['layers']} layers, `{row['layout']}`"
        lines.append(f"| {name} | {row['recompute']} | {how} | {peak / 1e9:.2f} | {said} |")
    return lines
