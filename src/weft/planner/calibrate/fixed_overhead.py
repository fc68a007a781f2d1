"""The fixed time of a step and the fixed memory of a process, measured with models too small to
count. Runs on every rank of a process group, and gives the same on all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from weft.engine import Engine
from weft.nn import decoder, next_token
from weft.parallel import plan as make_plan
from weft.train import highest_over_ranks, peak_memory_bytes

from .rank_timer import RankTimer

DIM, LENGTH, BLOCKS = 16, 8, 4


@dataclass(frozen=True)
class FixedOverhead:
    """Seconds of a step, and bytes of a rank, that belong to no size."""

    step_s: float
    process_bytes: int


def measure_overhead() -> FixedOverhead:
    """From a model of some blocks and one of twice as many: what is left when all blocks are taken
    away."""
    bench, ranks = RankTimer.here(), dist.get_world_size()
    models = (
        decoder(dim=DIM, layers=blocks, heads=2, seq_len=LENGTH) for blocks in (BLOCKS, 2 * BLOCKS)
    )
    times = [bench(engine_step(bench, model, f"dp{ranks}", ranks), waits=True) for model in models]
    outside = 0
    if bench.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(bench.device)
        outside = total - free - torch.cuda.memory_reserved(bench.device)
    return FixedOverhead(
        max(0.0, 2 * times[0] - times[1]),
        highest_over_ranks(outside or peak_memory_bytes(bench.device)),
    )


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named])


def engine_step(bench: RankTimer, model: nn.Module, layout: str, batch: int) -> partial:
    """An optimizer step of a decoder on so many samples of all ranks."""
    plan = make_plan(model, layout, batch=batch, loss=next_token)
    engine = Engine(model, plan, optimizer=adamw, loss=next_token, device=bench.device)
    ids = torch.zeros(batch, model.seq_len, dtype=torch.int64)
    return partial(engine.step, engine.local({"input_ids": ids}))
