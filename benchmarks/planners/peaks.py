"""Peaks: layouts of Llama models in Megatron-Core, for the question of what the fullest device
allocates.

Nobody ran them: SimuMax, whose model of memory was refined on peaks measured on B200, stands in for
a measurement.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import rows as published
from runs import Run

DEVICES, STEP = 64, 16  # microbatches of a step
LLAMA_3 = Run(
    id="",
    source="peaks",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    gated=True,
    vocab=128256,
    seq_len=4096,
    experts=1,
    accelerator="B200-SXM-180GB",
    devices=DEVICES,
    dtype="bf16",
    flash=True,
    tp=1,
    cp=1,
    pp=1,
    chunks=1,
    dp=DEVICES,
    zero=1,
    sequence=False,
    microbatch=1,
    batch=DEVICES * STEP,
    recompute="none",
    nic_bps=50e9,
)
MODELS: Mapping[str, Run] = {
    "Llama-3-8B": LLAMA_3,
    "Llama-3-70B": replace(LLAMA_3, layers=80, hidden=8192, heads=64, ffn=28672),
    "Llama-2-7B": replace(LLAMA_3, kv_heads=32, ffn=11008, vocab=32000),
    "Llama-2-13B": replace(
        LLAMA_3, layers=40, hidden=5120, heads=40, kv_heads=40, ffn=13824, vocab=32000
    ),
}


def layouts() -> list[Run]:
    """Every third one, for SimuMax takes a while for each."""
    found = []
    sizes = itertools.product(MODELS, (1, 2, 4, 8), (1, 2), (1, 2, 4, 8), (1, 2), ("none", "full"))
    for name, tp, cp, pp, microbatch, recompute in [
        each for each in sizes if math.prod(each[1:4]) <= DEVICES
    ][::3]:
        dp, model = DEVICES // (tp * cp * pp), MODELS[name]
        shape = (
            f"{name} pp{pp}.dp{dp}.cp{cp}.tp{tp}, microbatch {microbatch}, {recompute} recomputed"
        )
        found.append(
            replace(
                model,
                id=shape,
                tp=tp,
                cp=cp,
                pp=pp,
                dp=dp,
                sequence=tp > 1,
                microbatch=microbatch,
                batch=dp * microbatch * STEP,
                recompute=recompute,
            )
        )
    return found


def weft(runs: Sequence[Run]) -> dict[str, float]:
    """Run -> GiB that the fullest device allocates."""
    cases = [published.case(_row(run)) for run in runs]
    found = published.predict(cases)
    return {run.id: float(found[run.id][0].peak_bytes[found[run.id][1]]) / 2**30 for run in runs}


def _row(run: Run) -> dict[str, str]:
    """As the published runs are written."""
    cells = {
        "row_id": run.id,
        "layers": run.layers,
        "hidden": run.hidden,
        "heads": run.heads,
        "kv_heads": run.kv_heads,
        "ffn": run.ffn,
        "gated_mlp": "Y",
        "vocab": run.vocab,
        "seq_len": run.seq_len,
        "tied_emb": "N",
        "accelerator": run.accelerator,
        "n_accel": run.devices,
        "dtype": run.dtype,
        "framework": "Megatron-Core",
        "attn_kernel": "flash",
        "tp": run.tp,
        "cp": run.cp,
        "pp": run.pp,
        "dp": run.dp,
        "zero_stage": run.zero,
        "sp": "Y" if run.sequence else "N",
        "mbs": run.microbatch,
        "gbs": run.batch,
        "recompute": run.recompute,
    }
    return {name: str(value) for name, value in cells.items()}
