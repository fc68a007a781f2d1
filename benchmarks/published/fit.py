"""Fits the constants of eras to half of the published runs; the other half is held out.

    python benchmarks/published/fit.py [NAME ...]

What a sheet of weft's is fitted from is written there; what belongs to one site or framework alone,
to eras.toml here.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import rows as published
from cells import Uncovered
from kernels import ceiling, kernels

from weft.planner.cost.estimate import Estimate
from weft.planner.cost.fit import fit_era, fit_layers
from weft.planner.cost.hardware import GIB, SHEETS, Era, named_sheet, read_sheet
from weft.planner.cost.layer_correction import main_layer_shape

HERE = Path(__file__).parent
MEGATRON = (
    "matmul",
    "matmul_flops",
    "memory",
    "launch_s",
    "waits",
    "link",
    "meet_s",
    "fixed_s",
    "ragged",
)
# Launches are hidden in all of these runs, which therefore do not tell their cost; and a slower
# network that compute hides takes as long as a faster one that it does not, so how much it hides is
# held at a half.
SHARDED = (
    "matmul",
    "matmul_flops",
    "attention",
    "attention_backward",
    "memory",
    "traffic",
    "network",
    "fixed_s",
)

UNTOLD = 0.01  # the weight of a start, against a source of weight 1


@dataclass(frozen=True)
class Fitted:
    """One era: the sheets that get it, its runs as source -> weight, and which constants are
    free."""

    sheets: tuple[str, ...]
    era: str
    sources: Mapping[str, float]
    free: tuple[str, ...]  # by the seconds of steps
    start: Era = field(default_factory=Era)
    only: Callable[[published.Row], bool] = lambda row: True
    ours: bool = True  # whether it goes to weft's sheets
    everything: tuple[str, ...] = ()  # sources with so few rows that none is held out
    kept: tuple[str, ...] = ()  # which are free by the peaks of whole processes
    toward: float = UNTOLD  # the weight of the start, so that what no run tells stays there
    layers: tuple[
        str, ...
    ] = ()  # sources with many runs of each shape of a layer, which tell what constants leave


# FLOP/s of attention at 4096 tokens and heads of 128 on H100 SXM, forward with a causal mask and
# backward: figures 5 and 6 of FlashAttention-3 (Shah et al. 2024).
FLASH_2, CUDNN = (319e12, 310e12), (518e12, 499e12)


def h100_attention(forward: float, backward: float) -> dict[str, float]:
    """The shares of H100's peak that these FLOP/s are."""
    peak = named_sheet("h100").device.flops["bf16"]
    return {"attention": forward / peak, "attention_backward": backward / peak}


def a100_kernels() -> dict[str, float]:
    """What kernels reach of A100 SXM: more than those measured on A100 PCIe do, as far as its best
    matmul does."""
    found, _ = kernels("A100-PCIe-80GB")
    faster = ceiling("NVIDIA A100 SXM") / ceiling("NVIDIA A100 PCIe")
    return {
        "matmul_flops": found["matmul_flops"],
        "attention": found["attention"] * faster,
        "attention_backward": found["attention_backward"] * faster,
    }


KERNELS_A100 = a100_kernels()
EIGHT_H100 = ceiling("NVIDIA H100 SXM", "fp8") / ceiling("NVIDIA H100 SXM")
# Where no run tells a constant, it stays here. The host needs about 0.8 ms for a layer's forward,
# some sixty of torch's calls of 15 us, which are counted as 17 kernels; links reach what nccl-tests
# do over NVLink.
MEGATRON_A100 = Era(
    matmul=0.78,
    **KERNELS_A100,
    memory=0.7,
    launch_s=5e-5,
    link=0.78,
    network=0.6,  # what eager runs tell of the same networks: these tell it from nothing else
    meet_s=1e-4,
    fixed_s=0.01,
    waits=0.5,
)
# BigScience's scripts set CUDA_LAUNCH_BLOCKING=1: no launch is queued, and each adds to the work.
BLOCKING = MEGATRON_A100.model_copy(update={"waits": 1.0})
EAGER_A100 = Era(
    matmul=0.8,
    **KERNELS_A100,
    memory=0.6,
    network=0.45,
    launch_s=1e-5,
)
# Of two runs, which tell one constant: matmuls at the best one's rate, networks as they are by
# default.
COMPILED_A100 = EAGER_A100.model_copy(update={"matmul": 0.87, "network": 0.85})
HALF_HIDDEN = EAGER_A100.model_copy(update={"hidden": 0.5})
FLASH_H100 = EAGER_A100.model_copy(update={**h100_attention(*FLASH_2), "eight": EIGHT_H100})
# Of matmuls in 16 bits, which no run of its sources has, what kernels reach on A100 PCIe. The best
# of H100 reaches 0.8.
CORE_H100 = Era(
    matmul=0.74,
    matmul_flops=KERNELS_A100["matmul_flops"],
    **h100_attention(*CUDNN),
    eight=EIGHT_H100,
    memory=0.6,
    network=0.45,
    launch_s=1e-5,
)
CEILINGS = {
    "mi300x": ("AMD MI300X", "NVIDIA H100 SXM")
}  # sheet -> its card, and that of the constants it has
KERNELS = {"b200": "B200-SXM", "a100-pcie": "A100-PCIe-80GB"}  # sheet -> card of the kernels
MOST = 1.5  # of a share
FITS = {
    "a100-megatron": Fitted(
        ("a100", "a100-40"),
        "megatron",
        {"vtrain": 1, "mlm_sc21_table1": 1, "korthikanti2022_table5": 1},
        MEGATRON,
        MEGATRON_A100,
        everything=("mlm_sc21_table1", "korthikanti2022_table5"),
        layers=("vtrain",),
    ),
    "bloom": Fitted(
        ("a100-omnipath",),
        "megatron",
        {"bloom_prequel": 1},
        ("matmul", "matmul_flops", "launch_s", "link", "network", "uneven", "ragged_heads"),
        BLOCKING,
        ours=False,
        kept=("context_gib",),
    ),
    "v100-megatron": Fitted(
        ("v100",),
        "megatron",
        {"mlm_readme_sep2020": 1},
        ("matmul", "memory"),
        MEGATRON_A100,
        lambda row: "V100" in row["accelerator"],
        everything=("mlm_readme_sep2020",),
    ),
    "a100-eager": Fitted(
        ("a100", "a100-40", "a100-pcie"),
        "eager",
        {"llm_foundry": 1},
        SHARDED,
        HALF_HIDDEN,
        lambda row: "A100" in row["accelerator"],
    ),
    "deepspeed": Fitted(
        ("a100",),
        "deepspeed",
        {"deepspeed_azure_zero3": 1},
        ("matmul", "matmul_flops", "network", "hidden", "fixed_s"),
        EAGER_A100,
        ours=False,
    ),
    "a100-compiled": Fitted(
        ("a100", "a100-40", "a100-pcie"),
        "compiled",
        {"fms_fsdp": 1},
        ("hidden",),
        COMPILED_A100,
        lambda row: "A100" in row["accelerator"],
    ),
    "titan": Fitted(
        ("a100-titan",),
        "compiled",
        {"torchtitan": 1},
        ("matmul", "network", "hidden"),
        EAGER_A100,
        lambda row: "A100" in row["accelerator"],
        ours=False,
    ),
    "h100-eager": Fitted(
        ("h100", "h200"),
        "eager",
        {"llm_foundry": 1},
        (*SHARDED, "eight"),
        FLASH_H100.model_copy(update={"hidden": 0.5}),
        lambda row: "H100" in row["accelerator"],
    ),
    "h100-compiled": Fitted(
        ("h100", "h200"),
        "compiled",
        {"torchtitan": 1},
        ("eight", "attention", "attention_backward", "memory", "traffic", "link", "network"),
        FLASH_H100,  # matmuls reach what the best one does, 0.8: free, they would reach more
        lambda row: "H" in row["accelerator"].split("-")[0],
    ),
    "nanotron": Fitted(
        ("h100",),
        "nanotron",
        {"nanotron_ultrascale": 1},
        ("matmul", "memory", "network", "fixed_s"),
        FLASH_H100,
        ours=False,
    ),
    "h100-core": Fitted(
        ("h100", "h200"),
        "megatron-core",
        {"nemo_2024_h100": 1, "mlm_llama_h100_fp8": 0.3},
        ("eight", "attention", "traffic", "hidden", "network"),
        CORE_H100,
        lambda row: "H100" in row["accelerator"],
    ),
}


def fitted(one: Fitted, rows: list[published.Row]) -> Era:
    """Fits on those rows of its sources that are not held out."""
    era = agreed(one, rows, "d_iter_time_s", lambda made: made.step_s, one.start, one.free)
    if one.kept:
        era = agreed(
            one, rows, "peak_mem_gib", lambda made: made.process_bytes / GIB, era, one.kept
        )
    return told(one, rows, era) if one.layers else era


def runs_of(
    one: Fitted, source: str, rows: list[published.Row], column: str
) -> list[tuple[float, published.Case]]:
    """Those of a source that are fitted to, each with what stands in this column."""
    found = []
    for row in rows:
        kept = source in one.everything or not published.held(row)
        if row["source_id"] != source or not row.get(column) or not one.only(row) or not kept:
            continue
        try:
            case = published.case(row)
        except Uncovered:
            continue
        if case.setting.era == one.era:
            found.append((float(row[column]), case))
    return found


def agreed(
    one: Fitted,
    rows: list[published.Row],
    column: str,
    of: Callable[[Estimate], np.ndarray],
    start: Era,
    free: tuple[str, ...],
) -> Era:
    """With these constants free, `of` an estimate agrees with this column."""
    cases, seen, weights = [], [], []
    for source, weight in one.sources.items():
        those = runs_of(one, source, rows, column)
        if len(those) > 120:  # enough to say it
            those = those[:: len(those) // 120]
        cases += [case for _, case in those]
        seen += [value for value, _ in those]
        weights += [weight / max(1, len(those))] * len(those)
    groups = published.grouped(published.settled(cases, published.sites()))

    def predict(era: Era) -> np.ndarray:
        found = published.price(groups, {(sheet, one.era): era for sheet in one.sheets})
        return np.array([of(found[case.row_id][0])[found[case.row_id][1]] for case in cases])

    return fit_era(predict, seen, start, free, weights, toward=one.toward)


def told(one: Fitted, rows: list[published.Row], era: Era) -> Era:
    """With what its runs tell of layers of each shape."""
    those = [run for source in one.layers for run in runs_of(one, source, rows, "d_iter_time_s")]
    groups = published.grouped(case for _, case in those)
    at = {
        row: shape
        for group in groups
        for row, shape in zip(group.rows, main_layer_shape(group.model, group.choices))
    }

    def predict(era: Era) -> np.ndarray:
        found = published.price(groups, {(sheet, one.era): era for sheet in one.sheets})
        return np.array([found[case.row_id][0].step_s[found[case.row_id][1]] for _, case in those])

    return fit_layers(
        predict, [seen for seen, _ in those], np.array([at[case.row_id] for _, case in those]), era
    )


def basis(like: str, name: str) -> Era:
    """What stands in this sheet's era, but for layers: runs told of them."""
    return read_sheet(SHEETS / f"{like}.toml").eras[name].model_copy(update={"layers": ()})


def likes(sheet: str) -> dict[str, str]:
    """Era of a sheet -> the sheet that it is like, of those that are."""
    tables = tomllib.loads((SHEETS / f"{sheet}.toml").read_text(encoding="utf-8"))["eras"]
    return {name: table["like"] for name, table in tables.items() if "like" in table}


def section(name: str, era: Era, like: str | None) -> str:
    """A table of those constants that are not as by default, or as in the sheet that it is like."""
    plain = (basis(like, name.rpartition(".")[2]) if like else Era()).model_dump()
    kept = {
        key: value
        for key, value in era.model_dump(exclude={"layers"}).items()
        if value != plain[key]
    }
    text = f"[{name}]\n" + (f'like = "{like}"\n' if like else "")
    text += "".join(f"{key} = {value:.4g}\n" for key, value in kept.items())
    if not era.layers:
        return text
    each = (
        ", ".join(f"{key} = {value:.4g}" for key, value in layer.model_dump().items())
        for layer in era.layers
    )
    return text + "layers = [\n" + "".join(f"  {{ {layer} }},\n" for layer in each) + "]\n"


def put(path: Path, name: str, era: Era) -> None:
    """Replaces that table of the file, or adds it. What it is like stays."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    like = likes(path.stem).get(name.rpartition(".")[2]) if path.parent == SHEETS else None
    pattern = re.compile(rf"^\[{re.escape(name)}\]\n(?:(?!\[).*\n?)*", re.MULTILINE)
    new = section(name, era, like)
    text = (
        pattern.sub(new + "\n", text) if pattern.search(text) else text.rstrip("\n") + "\n\n" + new
    )
    path.write_text(re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n", encoding="utf-8")


def main() -> int:
    rows = published.own()
    for name, one in FITS.items():
        if len(sys.argv) > 1 and name not in sys.argv[1:]:
            continue
        era = fitted(one, rows)
        print(name, {key: float(f"{getattr(era, key):.3g}") for key in one.free}, flush=True)
        for sheet in one.sheets:
            if one.ours:
                named_sheet(sheet)  # which is to exist
                put(SHEETS / f"{sheet}.toml", f"eras.{one.era}", era)
            else:
                put(HERE / "eras.toml", f"{sheet}.{one.era}", era)
    for sheet, cards in CEILINGS.items():
        here, there = map(ceiling, cards)
        for era_name, like in likes(sheet).items():
            era = basis(like, era_name)
            put(
                SHEETS / f"{sheet}.toml",
                f"eras.{era_name}",
                era.model_copy(update={"matmul": era.matmul * here / there}),
            )
    for sheet, card in KERNELS.items():
        own, error = kernels(card)
        print(
            sheet,
            {key: float(f"{value:.3g}") for key, value in own.items()},
            f"held out: {error:.1%}",
            flush=True,
        )
        for era_name, like in likes(sheet).items():
            era, eight = basis(like, era_name), {}
            if (
                "fp8" in named_sheet(sheet).device.flops
            ):  # they reach the share that they do in that era elsewhere
                eight["eight"] = min(MOST, era.eight * era.matmul / own["matmul"])
            put(SHEETS / f"{sheet}.toml", f"eras.{era_name}", era.model_copy(update=own | eight))
    return 0


if __name__ == "__main__":
    sys.exit(main())
