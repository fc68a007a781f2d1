"""Rows: a published run as weft's cost model takes it: dimensions, layout, hardware, era of
software, practice.

Columns are those of training_runs.csv; an empty cell is not known, and what stands for it is said
here. What the model does not cover is refused with the reason.
"""

from __future__ import annotations

import csv
import inspect
import re
import tomllib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from cells import (
    Row,
    Uncovered,
    dtype,
    flag,
    fused_attention,
    memory,
    network,
    offloads,
    recomputed,
    unpriced,
    whole,
    zero,
)

from weft.core.layout import Layout
from weft.pipeline import schedules
from weft.planner.cost.estimate import Estimate, estimate
from weft.planner.cost.hardware import Cluster, Era, Hardware, named_sheet, sheet_names
from weft.planner.cost.layout_batch import LayoutBatch
from weft.planner.cost.model_work import BlockWork, ModelWork
from weft.planner.cost.precision_policy import PrecisionPolicy
from weft.planner.cost.transformer_work import Eager, TransformerDims, transformer_work
from weft.planner.search.constraints import STAGES

HERE = Path(__file__).parent
GPT2 = 50257  # words of its vocabulary, where a row does not say

SHEETS = (  # what an accelerator's name holds -> sheet; the first that fits
    ("V100", "v100"),
    ("A100", "a100"),
    ("A800", "a100"),
    ("GB200", "gb200"),
    ("GB300", "gb300"),
    ("B200", "b200"),
    ("B300", "b300"),
    ("GH200", "gh200"),
    ("H200", "h200"),
    ("H100", "h100"),
    ("H800", "h100"),
    ("H20", "h20"),
    ("MI300", "mi300x"),
    ("MI325", "mi325x"),
    ("L40S", "l40s"),
    ("4090", "rtx-4090"),
    ("TPU V4", "tpu-v4"),
    ("TPU V5E", "tpu-v5e"),
)
PCIE = {"a100": "a100-pcie", "h100": "h100-pcie"}  # sheet -> that of the same card without NVLink
PLAIN = ("l40s", "rtx-4090")  # cards that have no other
# The GB that a card is sold with, taken for GiB, are about so much more than its driver gives:
# whether a run fits is asked of them, for the estimate is no nearer than that.
SOLD = 1.01
# FlashAttention's first version; so is llm-foundry's in Triton (its flash_attn_triton.py)
FIRST = r"flash\D*1\.|flash\(triton\)"
XLA = ("jax", "t5x", "maxtext", "paxml")
FRAMEWORKS = (
    "megatron",
    "deepspeed",
    "neox",
    "titan",
    "fsdp",
    "composer",
    "nanotron",
    "nemo",
    "bridge",
    "core",
    "transformerengine",
    "aa-scaling",
    "internevo",
    "internlm",
    *XLA,
)
# Megatron-like mixed precision: 16-bit weights and gradients summed in 16 or 32 bits, float32
# masters and two moments.
MIXED = PrecisionPolicy(
    compute="bf16",
    weight_bytes=2,
    grad_bytes=4,
    state_bytes=12,
    reduce_bytes=4,
    gather_bytes=2,
    update_bytes=36,
    logit_bytes=10,
    overlaps=False,
    offloads=(),
)
FSDP = PrecisionPolicy(
    compute="bf16",
    weight_bytes=4,
    grad_bytes=4,
    state_bytes=8,
    reduce_bytes=4,
    gather_bytes=2,
    update_bytes=32,
    logit_bytes=10,
    offloads=(),
)


@dataclass(frozen=True)
class Setting:
    """What rows priced together have in common."""

    dims: TransformerDims
    cluster: Cluster
    era: str
    practice: PrecisionPolicy
    dtype: str
    flash: bool
    dropout: bool
    fused: bool
    by_ops: bool
    eager: tuple[Eager, ...] = ()
    flash_version: int = 2


@dataclass(frozen=True)
class Case:
    """One row."""

    row_id: str
    setting: Setting
    layout: Layout
    batch: int
    accumulate: int
    recompute: str | int
    schedule: str
    chunks: int
    shards: int
    experts: int
    told: bool = True  # whether the row says what is recomputed
    placed: bool = True  # whether it says what rests in host memory
    notes: tuple[str, ...] = ()  # what was taken for what the row says


def stages(row: Row) -> tuple[str, int]:
    """The schedule as `weft.pipeline.schedules` names it, and stages of a rank."""
    name, chunks = (row.get("schedule") or "1f1b").strip().lower(), whole(row, "vp", 0)
    if whole(row, "pp", 1) == 1:
        return "1f1b", 1
    if name in ("1f1b", "interleaved-1f1b", "interleaved"):
        chunks = chunks or (1 if name == "1f1b" else 2)
        return ("interleaved" if chunks > 1 else "1f1b"), chunks
    makers = schedules.builtin_schedules()
    if name not in makers:
        raise unpriced(row, "schedule", makers)
    given = inspect.signature(makers[name]).parameters
    if "chunks" in given:
        return name, chunks or given["chunks"].default
    own = STAGES.get(name, 1)
    if chunks not in (0, 1, own):
        raise Uncovered(f"vp = {chunks} is not what {name} has: {own}")
    return name, own


def framework(row: Row) -> tuple[str, PrecisionPolicy]:
    """The era of software, and how it keeps what belongs to a parameter: the least where a row does
    not state it."""
    name, kind, level = (
        (row.get("framework") or "Megatron-DeepSpeed").lower(),
        dtype(row),
        zero(row),
    )
    compiled = flag(row, "compile")  # None where it is not said
    if "zero-3" in name and "deepspeed" in name:
        return "deepspeed", replace(
            MIXED, compute="fp16", grad_bytes=2, reduce_bytes=2, overlaps=True, messages=4
        )
    if "internevo" in name or "internlm" in name:
        # HybridZeroOptimizer: gradients are summed in bf16, beside the backward; its step flattens
        # them into a second copy and casts that to float32, for torch 1.13's AdamW, whose ops read
        # and write each on its own and for a moment hold two more copies
        return "megatron", replace(
            MIXED,
            compute="bf16",
            keeps_sent=True,
            grad_bytes=2,
            reduce_bytes=2,
            added_bytes=6,
            overlaps=True,
            sums_whole=True,
            whole_bytes=12,
            awaits_weights=True,
            step_bytes=14,
            update_bytes=108,
        )
    if "titan" in name:
        eager = compiled is False
        # its blocks are compiled; its loss too in part of 2024, and since April of 2025 (pull
        # requests 642, 755, 1033), which leaves logits and a gradient
        late = not eager and (row.get("published") or "") >= "2025-04"
        return "eager" if eager else "compiled", replace(FSDP, logit_bytes=6 if late else 14)
    if "fsdp" in name or level == "3" or by_xla(row):
        fused = (
            4 if "composer" in name else 10
        )  # its cross-entropy writes the gradient over the logits
        eager = not (compiled or by_xla(row))
        return ("eager" if eager else "compiled"), replace(FSDP, reduce_bytes=2, logit_bytes=fused)
    if "nanotron" in name:
        return "nanotron", replace(
            MIXED,
            compute="bf16",
            overlaps=True,
            grad_bytes=6,
            added_bytes=12,
            state_bytes=12,
            logit_bytes=8,
            messages=9,
            awaits_weights=True,
            keeps_sent=True,
        )
    if "nemo" in name or "bridge" in name:
        return "megatron-core", replace(
            MIXED,
            grad_bytes=2,
            state_bytes=10,
            reduce_bytes=2,
            overlaps=True,
            logit_bytes=4,
            logits_stay=True,
            dummy_bytes=2,
            sends_beside=True,
        )
    modern = any(word in name for word in ("core", "nemo", "bridge", "mcore", "transformerengine"))
    if modern or "fp8" in kind:
        return "megatron-core", replace(
            MIXED,
            compute="bf16",
            overlaps=True,
            logit_bytes=4,
            logits_stay=True,
            dummy_bytes=2,
            sends_beside=True,
        )
    fp16 = "bf16" not in kind
    compute, reduced = ("fp16", 2) if fp16 else ("bf16", 4)
    added = (
        0 if fp16 else 12
    )  # in bf16 each microbatch's gradient is added to a sum in float32, and then is zero
    plain = replace(
        MIXED,
        compute=compute,
        reduce_bytes=reduced,
        added_bytes=added,
        scatters=True,
        keeps_sent=True,
        overlaps="DDP-impl=torch" in (row.get("notes") or ""),
    )
    if "aa-scaling" in name:
        # gradients are summed in bf16; the head gives all logits to each rank, whose loss is
        # torch's, in float32 (Aleph Alpha's scaling)
        return "megatron", replace(
            plain,
            grad_bytes=2,
            reduce_bytes=4,
            sums_whole=True,
            whole_bytes=34,
            added_bytes=6,
            scatters=False,
            gathers_logits=True,
            logit_bytes=18,
        )
    if "deepspeed" in name or "neox" in name:
        # its engine reduces gradients in buckets of 5e8, of float32 under bf16
        plain = replace(plain, grad_bytes=2 if fp16 else 4, bucket_bytes=5e8 * (2 if fp16 else 4))
        if not fp16:  # its BF16_Optimizer all-reduces float32
            plain = replace(plain, sums_whole=True, whole_bytes=24)
        if row.get(
            "framework"
        ):  # its optimizers copy their part of gradients in float32, in bf16 all that they sum
            plain = replace(plain, state_bytes=16) if fp16 else replace(plain, grad_bytes=6)
    return "megatron", plain


def eager_parts(row: Row, practice: PrecisionPolicy) -> tuple[Eager, ...]:
    """What goes op by op: norms and attention where a row says so, and a loss of all logits."""
    kernel = (row.get("attn_kernel") or "").strip().lower()
    parts: dict[Eager, bool] = {
        "norms": "RMS kernel=N" in (row.get("notes") or ""),
        "elementwise": "aa-scaling" in (row.get("framework") or "").lower(),
        "softmax": kernel == "torch",
        "loss": practice.gathers_logits,
    }
    return tuple(part for part, here in parts.items() if here)


def by_xla(row: Row) -> bool:
    """Whether XLA lays the run out: what is between layers is cut over the model's axis too."""
    return any(word in (row.get("framework") or "").lower() for word in XLA)


def hardware(row: Row) -> Hardware:
    """The sheet of the row's accelerator, with the networks that the row names."""
    name = (row.get("accelerator") or "A100-SXM4-80GB").strip()
    found, sold = (
        next((sheet for word, sheet in SHEETS if word in name.upper()), None),
        memory(row, name),
    )
    inside = (row.get("intra_link") or "").upper()
    pcie = "PCI" in name.upper() or ("PCI" in inside and "NVL" not in inside)
    if found == "h100" and re.search(r"\bNVL\b", name.upper()):
        found = None
    elif pcie and found not in PLAIN:
        found, name = PCIE.get(found or ""), f"{name} over PCIe"
    if found is None:
        raise Uncovered(f"there is no sheet of {name}")
    if found == "a100" and sold == 40:
        found = "a100-40"
    sheet = named_sheet(found)
    device = sheet.device.model_copy(update={"memory_gib": sold or SOLD * sheet.device.memory_gib})
    sheet = sheet.model_copy(update={"device": device})
    link, titan = row.get("inter_link") or "", "titan" in (row.get("framework") or "").lower()
    if "omni" in link.lower():
        sheet = sheet.model_copy(update={"name": f"{sheet.name}-omnipath"})
    elif titan and not link:  # it is some other network than the sheet's
        sheet = sheet.model_copy(update={"name": f"{sheet.name}-titan"})
    if "2.4TB/s" in name:
        sheet = sheet.model_copy(
            update={"device": sheet.device.model_copy(update={"memory_bps": 2.4e12})}
        )
    node = whole(row, "accel_per_node", sheet.node)
    inner, *outer = sheet.tiers
    inner = inner.model_copy(
        update={"devices": max(node, 72 if "NVL72" in (row.get("intra_link") or "") else node)}
    )
    if re.search("[AH]800", name.upper()) and not pcie:  # an A100 or H100 with less of NVLink
        inner = inner.model_copy(update={"bps": 200e9})
    if "EFA" in link:  # whose messages go through the host
        outer = [tier.model_copy(update={"latency_s": 6e-5}) for tier in outer]
    rate = network(row, node)
    if rate and outer:
        outer = [outer[0].model_copy(update={"bps": rate})]
    return sheet.model_copy(update={"tiers": (inner, *outer)})


def dims(row: Row) -> TransformerDims:
    hidden, gated = whole(row, "hidden"), bool(flag(row, "gated_mlp"))
    heads, tp, experts = whole(row, "heads"), whole(row, "tp", 1), whole(row, "n_experts", 0)
    vocab = whole(row, "vocab", GPT2)
    if tp > 1:  # as Megatron pads it
        vocab = -(-vocab // (128 * tp)) * 128 * tp
    return TransformerDims(
        layers=whole(row, "layers"),
        hidden=hidden,
        heads=heads,
        vocab=vocab,
        seq_len=whole(row, "seq_len"),
        ffn=whole(row, "ffn", 4 * hidden),
        kv_heads=whole(row, "kv_heads", heads),
        head_dim=whole(row, "head_dim", 0),
        gated=gated,
        tied=flag(row, "tied_emb") is not False,
        num_experts=experts,
        top_k=whole(row, "top_k") if experts else 0,
        moe_ffn=whole(row, "moe_ffn", whole(row, "ffn", 0) or None) if experts else 0,
    )


def case(row: Row) -> Case:
    """Raises Uncovered."""
    era, practice = framework(row)
    kind = dtype(row)
    sheet = hardware(row)
    if "fp4" in kind:
        raise Uncovered(f"{row.get('dtype')}: there are no peaks of 4 bits")
    if "fp8" in kind:
        practice = replace(practice, compute="fp8")
    practice = replace(practice, offloads=offloads(row))
    if practice.compute not in sheet.device.flops:
        raise Uncovered(f"{sheet.name} has no peak of {practice.compute}")
    sizes = {axis: whole(row, axis, 1) for axis in ("tp", "cp", "pp", "ep")}
    n = whole(row, "n_accel", 0) or whole(row, "dp") * sizes["tp"] * sizes["cp"] * sizes["pp"]
    dp = whole(row, "dp", n // (sizes["tp"] * sizes["cp"] * sizes["pp"]))
    if dp * sizes["tp"] * sizes["cp"] * sizes["pp"] != n:
        laid = " x ".join(
            f"{axis}{size}" for axis, size in ({"dp": dp} | sizes).items() if axis != "ep"
        )
        raise Uncovered(f"{n} accelerators are not {laid}")
    mbs = whole(row, "mbs")
    batch = whole(row, "gbs", dp * mbs * whole(row, "grad_accum", 0) or None)
    accumulate = max(1, round(batch / (dp * mbs)))
    group, level = whole(row, "shard_group", 0) or dp, zero(row)
    axes = [f"pp{sizes['pp']}"]
    shards = min(group, dp) * sizes["cp"] if level != "0" else 1  # over ranks of a sequence too
    if shards > 1:
        sharded = min(dp, group)
        option = "" if level == "3" else f"+zero{level}"
        spread = "+ep" if sizes["ep"] > 1 else ""
        axes += [f"dp{dp // sharded}", f"fsdp{sharded}{option}{spread}"]
    else:
        axes += [f"dp{dp}" + ("+ep" if sizes["ep"] > 1 else "")]
    sequence = (bool(flag(row, "sp")) or by_xla(row)) and sizes["tp"] > 1
    axes += [f"cp{sizes['cp']}", f"tp{sizes['tp']}" + ("+sequence" if sequence else "")]
    name, chunks = stages(row)
    told = fused_attention(row)
    flash = era != "megatron" if told is None else told
    fused = "nanotron" not in (row.get("framework") or "").lower()
    text = recomputed(row)
    recompute: str | int = "full" if text == "full" else "none"
    if text.startswith("selective"):
        # torchtitan's "op" runs every second matmul again; of others, what is run again is not said
        recompute = "selective" if "core" in text else 2
    model = dims(row)
    _check(model, sizes, chunks, n)
    if dp % group and group % dp:
        raise Uncovered(f"dp{dp} is not parted into groups of {group} that shard")
    setting = Setting(
        model,
        Cluster(hardware=sheet, devices=n),
        era,
        practice,
        practice.compute,
        flash,
        not flash and not model.gated,
        fused,
        eager=eager_parts(row, practice),
        flash_version=1 if re.search(FIRST, row.get("attn_kernel") or "") else 2,
        by_ops=text.startswith("selective-op"),
    )
    return Case(
        row["row_id"],
        setting,
        Layout.parse(".".join(axes)),
        dp * mbs * accumulate,
        accumulate,
        recompute,
        name,
        chunks,
        shards,
        sizes["ep"] if whole(row, "n_experts", 0) else 1,
        told=(row.get("recompute") or "").strip().lower()
        not in ("", "selective"),  # of how many blocks?
        placed=era != "deepspeed" or bool((row.get("offload") or "").strip()),
        notes=tuple(_notes(row, era, sheet, n, batch, dp * mbs * accumulate)),
    )


def _check(model: TransformerDims, sizes: Mapping[str, int], chunks: int, n: int) -> None:
    """Raises Uncovered for what no software could lay so."""
    tp, pp, ep, keys = sizes["tp"], sizes["pp"], sizes["ep"], model.kv_heads or model.heads
    problems = (
        (model.heads % tp, f"{model.heads} heads do not divide over tp{tp}"),
        (keys % tp and tp % keys, f"{keys} key heads do not divide over tp{tp}"),
        (
            not model.head_dim and model.hidden % model.heads,
            f"hidden {model.hidden} is no multiple of the heads",
        ),
        (
            pp * chunks > transformer_work(model).parts,
            f"{model.layers} layers are too few for {pp * chunks} stages",
        ),
        (model.heads % keys, f"{model.heads} heads do not divide over {keys} key heads"),
        (
            model.top_k > model.num_experts,
            f"there are no {model.top_k} of {model.num_experts} experts",
        ),
        (not model.num_experts and ep > 1, f"ep{ep} has no experts"),
        (
            model.num_experts and model.num_experts % ep,
            f"{model.num_experts} experts do not divide over ep{ep}",
        ),
        (
            model.num_experts and n // pp % ep,
            f"the {n // pp} ranks of a stage do not divide by ep{ep}",
        ),
    )
    for wrong, problem in problems:
        if wrong:
            raise Uncovered(problem)


def _notes(row: Row, era: str, sheet: Hardware, n: int, batch: int, priced: int) -> Iterable[str]:
    """What of a row is taken for something else, or for nothing."""
    name, link = row.get("framework") or "", row.get("inter_link") or ""
    if name and not any(word in name.lower() for word in FRAMEWORKS):
        yield f"framework {name!r} is priced as {era}"
    if (
        link
        and n > sheet.tiers[0].devices
        and "omni" not in link.lower()
        and network(row, 1) is None
    ):
        yield f"inter_link {link!r} names no rate: priced with {sheet.tiers[-1].name}"
    parts = whole(row, "grad_accum", 0)
    if (
        parts
        and parts
        * whole(row, "mbs")
        * (n // whole(row, "tp", 1) // whole(row, "cp", 1) // whole(row, "pp", 1))
        != batch
    ):
        yield f"grad_accum {parts} is not gbs / (dp x mbs): priced as gbs has it"
    if batch != priced:
        yield f"gbs {batch} is no multiple of dp x mbs: priced as {priced}"


@dataclass(frozen=True)
class Group:
    """Cases that are priced together."""

    setting: Setting
    model: ModelWork
    choices: LayoutBatch
    rows: tuple[str, ...]


def _saved_by_ops(model: ModelWork, dims: TransformerDims) -> ModelWork:
    """With layers that save so much that, where every second runs again, they keep in the mean what
    torchtitan's "op" does: a layer's input, attention's output and what every second matmul gives.
    """
    matmuls = dims.query + 2 * dims.keys + 2 * dims.hidden + (2 if dims.gated else 1) * dims.ffn
    stays = (matmuls / 2 + dims.query + dims.hidden) * dims.seq_len * model.itemsize

    def less(layer: BlockWork) -> BlockWork:
        share = (2 * stays - layer.output_bytes) / sum(op.saved_bytes for op in layer.ops)
        return replace(
            layer, ops=tuple(replace(op, saved_bytes=share * op.saved_bytes) for op in layer.ops)
        )

    return replace(
        model, blocks=tuple(less(block) if block.repeated else block for block in model.blocks)
    )


def grouped(cases: Iterable[Case]) -> list[Group]:
    groups: dict[str, list[Case]] = {}
    for one in cases:
        groups.setdefault(repr(one.setting), []).append(one)
    found = []
    for those in groups.values():
        setting = those[0].setting
        model = transformer_work(
            setting.dims,
            setting.dtype,
            flash=setting.flash,
            dropout=setting.dropout,
            fused=setting.fused,
            eager=setting.eager,
            flash_version=setting.flash_version,
        )
        if setting.by_ops:
            model = _saved_by_ops(model, setting.dims)
        choices = LayoutBatch.of(
            [one.layout for one in those],
            batch=1,
            accumulate=[one.accumulate for one in those],
            recompute=[one.recompute for one in those],
            schedule=[one.schedule for one in those],
            chunks=[one.chunks for one in those],
        )
        batch = np.array([one.batch for one in those])
        choices = replace(
            choices,
            microbatch=choices.microbatch * batch,
            shards=np.array([max(1, one.shards) for one in those]),
            experts=np.array([one.experts for one in those]),
            offload=np.full(len(those), bool(setting.practice.offloads)),
        )
        found.append(Group(setting, model, choices, tuple(one.row_id for one in those)))
    return found


def price(
    groups: Iterable[Group], eras: Mapping[tuple[str, str], Era]
) -> dict[str, tuple[Estimate, int]]:
    """Row -> the estimate that holds it, and its place there. `eras`: (sheet, era) -> constants,
    not a sheet's."""
    found = {}
    for group in groups:
        setting = group.setting
        sheet = setting.cluster.hardware
        own = sheet.eras.get(setting.era) or sheet.eras.get("eager") or Era()
        era = eras.get((sheet.name, setting.era)) or own
        made = estimate(group.model, group.choices, setting.cluster, era, setting.practice)
        found.update({row: (made, place) for place, row in enumerate(group.rows)})
    return found


def constants() -> dict[tuple[str, str], Era]:
    """(sheet, era) -> its constants alone, of those that have layers."""
    return {
        (sheet, name): era.model_copy(update={"layers": ()})
        for sheet in sheet_names()
        for name, era in named_sheet(sheet).eras.items()
        if era.layers
    }


def predict(
    cases: Sequence[Case], others: Mapping[tuple[str, str], Era] | None = None
) -> dict[str, tuple[Estimate, int]]:
    """As `price`, with the constants of sites, and with `others` in place of a sheet's."""
    eras = {**sites(), **(others or {})}
    return price(grouped(settled(cases, eras)), eras)


def _again(one: Case) -> Case:
    return one if one.told else replace(one, recompute="full")


def _away(*what: str) -> Callable[[Case], Case]:
    def moved(one: Case) -> Case:
        practice = replace(one.setting.practice, offloads=what)
        return one if one.placed else replace(one, setting=replace(one.setting, practice=practice))

    return moved


# as DeepSpeed's recipes for Azure advise, and its report of those runs says (documents of 2022-07)
REMEDIES = (_again, _away("gradients", "optimizer"), _away("gradients", "optimizer", "activations"))


def settled(cases: Sequence[Case], eras: Mapping[tuple[str, str], Era]) -> list[Case]:
    """What a row does not say is recomputed, or rests in host memory, is so where it must be, to
    fit."""
    found = list(cases)
    for remedy in REMEDIES:
        made = price(grouped(one for one in found if not one.told or not one.placed), eras)
        short = {row for row, (estimate, place) in made.items() if not estimate.fits[place]}
        found = [remedy(one) if one.row_id in short else one for one in found]
    return found


def held(row: Row) -> bool:
    """Whether no constant is fitted to this row: half of all, by chance."""
    return bool(zlib.crc32(row["row_id"].encode()) & 1)


def own() -> list[Row]:
    """The repository's copy of published runs."""
    runs = [
        row
        for name in ("training_runs", "layout_runs")
        for row in read(HERE / "data" / f"{name}.csv")
    ]
    single = [
        {
            **row,
            "source_id": "vtrain",
            "d_iter_time_s": row["iter_time_s"],
            "quality": "A",
        }
        for row in read(HERE / "data" / "vtrain_single_node.csv")
    ]
    return [*runs, *single]


def sites() -> dict[tuple[str, str], Era]:
    """Constants of one site or framework alone, in eras.toml: (sheet, era) -> them."""
    path = HERE / "eras.toml"
    tables = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {
        (s, name): Era.model_validate(one)
        for s, eras in tables.items()
        for name, one in eras.items()
    }


def read(path: Path) -> list[Row]:
    """Raises SystemExit for a file that is no table with a row_id."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [{key: text for key, text in row.items() if key} for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise SystemExit(f"{path} cannot be read: {problem}") from None
    if not rows:
        raise SystemExit(f"{path} has no rows")
    if "row_id" not in rows[0]:
        raise SystemExit(f"{path} has no column row_id")
    return rows
