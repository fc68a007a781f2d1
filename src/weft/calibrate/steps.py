"""What a step and a process take before they have anything to compute: optimizer steps of weft's engine with models too
small to count. Runs on every rank of a process group, and gives the same on all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from .. import losses, planner
from ..engine import Engine
from ..models import decoder
from ..train.metrics import highest, peak_memory_bytes
from .bench import Bench

DIM, LENGTH, BLOCKS = 16, 8, 4


@dataclass(frozen=True)
class Floor:
    """Seconds of a step, and bytes of a rank, that belong to no size."""

    step_s: float
    process_bytes: int


def floor() -> Floor:
    """From a model of some blocks and one of twice as many: what is left when all blocks are taken away."""
    bench, ranks = Bench.here(), dist.get_world_size()
    times = [bench(_step(bench, blocks, ranks), waits=True) for blocks in (BLOCKS, 2 * BLOCKS)]
    outside = 0
    if bench.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(bench.device)
        outside = total - free - torch.cuda.memory_reserved(bench.device)
    return Floor(max(0.0, 2 * times[0] - times[1]), highest(outside or peak_memory_bytes(bench.device)))


def _step(bench: Bench, blocks: int, ranks: int) -> partial:
    model = decoder(dim=DIM, layers=blocks, heads=2, seq_len=LENGTH)
    plan = planner.plan(model, f"dp{ranks}", batch=ranks, loss=losses.next_token)
    engine = Engine(
        model, plan, optimizer=lambda named: torch.optim.AdamW([p for _, p in named]), loss=losses.next_token,
        device=bench.device,
    )  # fmt: skip
    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    return partial(engine.step, {"input_ids": ids, "labels": ids})
