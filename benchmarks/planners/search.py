"""The search: every layout of one model on one cluster, for the question of how many layouts a
planner prices a second.

GPT-175B on 1,024 A100, 1,536 sequences a step.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from runs import Run

from weft.core.layout import Layout
from weft.planner.cost.estimate import Estimate, estimate
from weft.planner.cost.hardware import Cluster
from weft.planner.cost.layout_batch import LayoutBatch
from weft.planner.cost.precision_policy import PrecisionPolicy
from weft.planner.cost.transformer_work import TransformerDims, transformer_work

DEVICES, BATCH, MANY = 1024, 1536, 100_000
MODEL = Run(
    id="",
    source="search",
    layers=96,
    hidden=12288,
    heads=96,
    kv_heads=96,
    ffn=49152,
    gated=False,
    vocab=51200,
    seq_len=2048,
    experts=1,
    accelerator="A100-SXM4-80GB",
    devices=DEVICES,
    dtype="fp16",
    flash=False,
    tp=1,
    cp=1,
    pp=1,
    chunks=1,
    dp=1,
    zero=0,
    sequence=False,
    microbatch=1,
    batch=BATCH,
    recompute="none",
    nic_bps=25e9,
)


def layouts() -> list[Run]:
    """In an order drawn at random, so that any first part of them is a fair sample."""
    found = []
    for tp, pp, microbatch, zero in itertools.product(
        (1, 2, 4, 8), (1, 2, 4, 8, 16, 32), (1, 2, 4, 8), (0, 1)
    ):
        dp, chunked = (
            DEVICES // (tp * pp),
            [v for v in (1, 2, 3, 4, 6) if 96 % (pp * v) == 0] if pp > 2 else [1],
        )
        if BATCH % (dp * microbatch):
            continue
        for chunks, sequence, recompute in itertools.product(
            chunked, (False, True) if tp > 1 else (False,), ("none", "selective", "full")
        ):
            if chunks == 1 or BATCH // (dp * microbatch) % pp == 0:
                found.append(
                    replace(
                        MODEL,
                        id=str(len(found)),
                        tp=tp,
                        pp=pp,
                        dp=dp,
                        zero=zero if dp > 1 else 0,
                        chunks=chunks,
                        sequence=sequence,
                        microbatch=microbatch,
                        recompute=recompute,
                    )
                )
    random.Random(0).shuffle(found)
    return found


def weft(runs: list[Run], limit_s: float) -> dict[str, float]:
    """Layouts a second that weft prices, time and memory: "from layouts", with putting them into
    arrays; and "from arrays", the same ones over and over, as many as a search has."""
    named = [
        Layout.parse(
            f"pp{run.pp}.{f'fsdp{run.dp}+zero1' if run.zero else f'dp{run.dp}'}.tp{run.tp}"
            + ("+sequence" if run.sequence else "")
        )
        for run in runs
    ]
    dims = TransformerDims(
        layers=MODEL.layers,
        hidden=MODEL.hidden,
        heads=MODEL.heads,
        vocab=MODEL.vocab,
        seq_len=MODEL.seq_len,
        ffn=MODEL.ffn,
    )
    cluster = Cluster.parse(f"a100x{DEVICES}")
    era, practice, model = (
        cluster.hardware.era("megatron"),
        PrecisionPolicy(compute="fp16"),
        transformer_work(dims, "fp16", flash=False),
    )

    def built() -> LayoutBatch:
        return LayoutBatch.of(
            named,
            batch=BATCH,
            accumulate=[BATCH // (run.dp * run.microbatch) for run in runs],
            recompute=[run.recompute for run in runs],
            chunks=[run.chunks for run in runs],
            schedule=["interleaved" if run.chunks > 1 else "1f1b" for run in runs],
        )

    many = built().take(np.tile(np.arange(len(runs)), -(-MANY // len(runs))))
    return {
        "from layouts": _rate(
            lambda: estimate(model, built(), cluster, era, practice), limit_s / 2
        ),
        "from arrays": _rate(lambda: estimate(model, many, cluster, era, practice), limit_s / 2),
    }


def _rate(priced: Callable[[], Estimate], limit_s: float) -> float:
    done, start = 0, time.process_time()
    while (took_s := time.process_time() - start) < limit_s:
        done += len(priced().step_s)
    return done / took_s
