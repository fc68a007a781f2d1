"""Measures whole decoder blocks: what matmuls and attention do not explain is fitted to the
number of ops and the bytes that they move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from weft.core import Layout
from weft.nn import decoder, next_token

from ..cost.estimate import estimate
from ..cost.hardware import Cluster, Era, Hardware
from ..cost.layout_batch import LayoutBatch
from ..cost.model_work import ModelWork
from ..cost.precision_policy import PrecisionPolicy
from ..cost.profile import profile_model
from .rank_timer import RankTimer
from .robust_fit import FittedLine, fit_line

LAYERS, VOCAB, HEAD_DIM = 2, 256, 32
SHAPES = tuple(
    (dim, length)
    for dim in (64, 128, 256, 512)
    for length in (16, 64, 128, 256)
    if dim * length < 1 << 17
)
SAMPLES = 4
FRESH_BYTES = 8.0  # of a weight's gradient, which is written to memory that is new


@dataclass(frozen=True)
class DecoderTiming:
    """A decoder of this width, on SAMPLES sequences of this length, forward and backward."""

    dim: int
    length: int
    seconds: float


def time_decoders() -> list[DecoderTiming]:
    """Runs on every rank of a process group, and gives the same on all."""
    bench, found = RankTimer.here(), list[DecoderTiming]()
    for dim, length in SHAPES:
        model, batch = _make_block(dim, length)
        model.to(bench.device)
        here = {key: value.to(bench.device) for key, value in batch.items()}

        def work(model: nn.Module = model, here: dict[str, Tensor] = here) -> None:
            model.zero_grad(set_to_none=True)
            next_token(model(here["input_ids"]), here)[0].backward()

        found.append(DecoderTiming(dim, length, bench(work)))
    return found


def left_over(seen: Sequence[DecoderTiming], hardware: Hardware, era: Era) -> FittedLine:
    """Seconds of an operation's launch, and bytes per second that operations move, where `era` has
    all but these."""
    practice, one = (
        PrecisionPolicy(compute="fp32"),
        LayoutBatch.of([Layout.parse("dp1")], batch=SAMPLES),
    )
    bare = era.model_copy(update={"launch_s": 0.0, "fixed_s": 0.0})
    rate = hardware.device.memory_bps * era.memory
    kernels, moved, rest, whole = [], [], [], []
    for each in seen:
        work = work_of(each.dim, each.length)
        parts = estimate(work, one, Cluster(hardware=hardware, devices=1), bare, practice).time
        priced = {part.name: float(part.value[0]) for part in parts}
        kernels.append(
            2 * sum(block.count * op.kernels for block in work.blocks for op in block.ops)
        )
        moved.append(priced["memory"] * rate / era.traffic)
        rest.append(
            each.seconds - priced["matmul"] - priced["attention"] - FRESH_BYTES * work.params / rate
        )
        whole.append(each.seconds)
    return fit_line(moved, rest, kernels, whole)


@cache
def work_of(dim: int, length: int) -> ModelWork:
    """Of one sample of such a decoder."""
    return profile_model(*_make_block(dim, length), next_token)


def _make_block(dim: int, length: int) -> tuple[nn.Module, dict[str, Tensor]]:
    model = decoder(vocab=VOCAB, dim=dim, layers=LAYERS, heads=dim // HEAD_DIM, seq_len=length)
    return model, dict.fromkeys(
        ("input_ids", "labels"), torch.zeros(SAMPLES, length, dtype=torch.int64)
    )
