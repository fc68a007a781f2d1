"""The memory of the start: what benchmarks/start measured, what an engine gathers, and where it is
the peak."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weft
from weft.core import Layout
from weft.engine import gathered_model
from weft.nn.losses import next_token
from weft.nn.models import decoder
from weft.planner.cost import memory
from weft.planner.cost.layout_batch import LayoutBatch
from weft.planner.cost.memory import whole_at_start
from weft.planner.cost.model_work import ModelWork
from weft.planner.cost.precision_policy import PrecisionPolicy
from weft.planner.cost.transformer_work import TransformerDims, transformer_work

MEASURED = Path("benchmarks/start/results/drawn.json")
# as benchmarks/start has it, and the decoder of the same sizes
LARGE = TransformerDims(16, 2048, 16, 32000, 16, 5472, gated=True, tied=False)
SMALL = TransformerDims(2, 32, 4, 67, 8, 96, gated=True, tied=False)
FP32 = PrecisionPolicy(compute="fp32", gather_bytes=4, start_bytes=4)


def frozen(dims: TransformerDims) -> ModelWork:
    """Of which nothing is trained but the head."""
    work = transformer_work(dims)
    blocks = [replace(block, frozen=block.params) for block in work.blocks[:-1]]
    return replace(work, blocks=(*blocks, work.blocks[-1]))


def peak(work: ModelWork, layout: str, practice: PrecisionPolicy = FP32) -> dict[str, float]:
    choices = LayoutBatch.of([Layout.parse(layout)], batch=16)
    live = np.ones(1), np.ones(1)
    parts = memory.peak_memory(work, choices, practice, live, None)
    return {part.name: float(part.value[0]) for part in parts}


@pytest.mark.parametrize("layout", ["fsdp4", "dp2.fsdp2"])
def test_the_start_of_sharded_states_is_as_measured(layout: str) -> None:
    """These ranks compare nothing: a whole weight at a time stands beside the shards."""
    rows = json.loads(MEASURED.read_text())["runs"]
    row = next(r for r in rows if r["layout"] == layout and not r["whole"])
    work = transformer_work(LARGE)
    whole = float(whole_at_start(work, LayoutBatch.of([Layout.parse(layout)], batch=16))[0])
    assert 4e-6 * whole == pytest.approx(row["largest"], rel=0.02)
    weights = 1e-6 * peak(work, layout)["weights"]
    assert weights == pytest.approx(row["shards"], rel=0.02)
    assert weights + 4e-6 * whole == pytest.approx(row["peak"], rel=0.06)


def gathered_elements() -> dict[str, list[int]]:
    """Elements of each weight that a rank gathers for the whole model, for each unit of the
    comparison before the first step; "" is all that no block holds."""
    seen: dict[str, list[int]] = {}
    real = gathered_model.GatheredModel._unit

    @contextmanager
    def unit(self: Any, name: str, module: Any) -> Iterator[Any]:
        with real(self, name, module) as fresh:
            seen.setdefault(name, [p.numel() for p in fresh.values()])
            yield fresh

    gathered_model.GatheredModel._unit = unit
    try:
        model = weft.deferred_init(partial(decoder, 67, 32, 2, 4, hidden=96, seq_len=8), 0)
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        sample = {"input_ids": tokens}
        plan = weft.plan(model, "tp2", batch=8, loss=next_token, sample=sample)
        adamw = partial(torch.optim.AdamW, lr=1e-3)
        weft.Engine(
            model,
            plan,
            optimizer=adamw,
            loss=next_token,
            device="cpu",
            sample=sample,
            compile="off",
        )
    finally:
        gathered_model.GatheredModel._unit = real
    return seen


def test_an_engine_gathers_what_the_plan_counts(pool: Any) -> None:
    seen = pool.run(gathered_elements, world=2)[0]
    root, blocks = seen.pop(""), [sum(sizes) for sizes in seen.values()]
    assert len(blocks) == 2
    choices = LayoutBatch.of([Layout.parse("tp2")], batch=8)
    counted = float(whole_at_start(transformer_work(SMALL), choices)[0])
    assert counted == pytest.approx(sum(root) + max(2 * max(blocks), max(root)), rel=0.01)


def test_the_start_counts_where_it_is_more_than_training() -> None:
    wide = transformer_work(replace(SMALL, vocab=100_000, hidden=256))
    trains = peak(wide, "tp8", replace(FP32, start_bytes=0.0))
    found = peak(wide, "tp8")
    assert trains["start"] == 0 < found["start"]
    held = found["weights"] + 4 * float(
        whole_at_start(wide, LayoutBatch.of([Layout.parse("tp8")], batch=16))[0]
    )
    assert sum(found.values()) == pytest.approx(held)
    assert peak(frozen(LARGE), "tp2")["start"] > 0 == peak(transformer_work(LARGE), "tp2")["start"]
    assert peak(wide, "dp8")["start"] == 0  # gradients take as much as the whole model
