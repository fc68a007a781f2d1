"""What a collective costs beside compute: an optimizer step on layouts with many collectives,
beside the same step with one. Ranks come to a collective at different times, and what carries
messages waits for a core. Timed on every rank of a process group, with the same found on all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from weft.core import Layout
from weft.nn import decoder, next_token

from ..cost.estimate import estimate
from ..cost.hardware import Cluster, Era, Hardware
from ..cost.layout_batch import LayoutBatch
from ..cost.profile import profile_model
from ..search.run_precision import precision_policy
from .fixed_overhead import adamw, engine_step
from .rank_timer import RankTimer

LAYERS, HEADS, HEAD_DIM, LENGTH, VOCAB = 4, 8, 16, 128, 256
EACH = 4  # samples of a rank
AXES = ("dp", "fsdp", "tp")
LITTLE_S = 1e-5


@dataclass(frozen=True)
class LayoutTiming:
    """An optimizer step on this layout."""

    layout: str
    seconds: float


def steps() -> list[LayoutTiming]:
    """On every layout of AXES that takes all ranks, the one with a single sum first."""
    bench, ranks = RankTimer.here(), dist.get_world_size()
    layouts = [f"{axis}{ranks}" for axis in AXES if axis != "tp" or HEADS % ranks == 0]
    made = ((layout, engine_step(bench, _model(), layout, EACH * ranks)) for layout in layouts)
    return [LayoutTiming(layout, bench(step, waits=True)) for layout, step in made]


def skew_s(seen: Sequence[LayoutTiming], hardware: Hardware, era: Era) -> float:
    """Seconds that ranks lose at each collective beside what its messages take: of what layouts
    take more than the first one, what is left over, for each collective that the estimate prices.
    """
    if len(seen) < 2:
        return 0.0
    layouts = [Layout.parse(each.layout) for each in seen]
    ranks = layouts[0].world
    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    work = profile_model(_model(), {"input_ids": ids}, next_token)
    choices, own = LayoutBatch.of(layouts, batch=EACH * ranks), precision_policy("fp32", adamw)

    def priced(seconds: float) -> np.ndarray:
        there = era.model_copy(update={"meet_s": seconds})
        return estimate(work, choices, Cluster(hardware=hardware, devices=ranks), there, own).step_s

    without = priced(0.0)
    times = (priced(LITTLE_S) - without) / LITTLE_S
    left = np.array([each.seconds for each in seen]) - without
    times, left = times - times[0], left - left[0]
    return max(0.0, float(times @ left / (times @ times)))


def _model() -> nn.Module:
    return decoder(vocab=VOCAB, dim=HEADS * HEAD_DIM, layers=LAYERS, heads=HEADS, seq_len=LENGTH)
