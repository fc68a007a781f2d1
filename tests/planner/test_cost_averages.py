"""`weft plan` counts the moving averages of `train.ema`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.planner.test_search import cluster
from tests.run_files import TINY
from weft.core import RunConfig
from weft.core.run_config import load_run
from weft.engine import Engine, WeightAverage
from weft.planner.cost.breakdown import MemoryPart, TimePart
from weft.planner.cost.estimate import estimate
from weft.planner.search.query_from_run import query_from_run
from weft.train import build, build_data


def averaged(folder: Path, layout: str, **more: str) -> RunConfig:
    (folder / "run.toml").write_text(TINY)
    keys = {"layout.axes": json.dumps(layout), "train.ema": "0.9", "model.layers": "2", **more}
    return load_run(folder / "run.toml", keys)


def held_bytes(run: RunConfig) -> int:
    """What the averages of this rank take."""
    sample = build_data.sample_batch(run, build_data.build_dataset(run))
    model, plan = build.build_for_ranks(run, sample)
    sgd = partial(torch.optim.SGD, lr=0.1)
    engine = Engine(model, plan, optimizer=sgd, loss=build.build_loss(run))
    values = WeightAverage(engine, 0.9, False)._values.values()
    return sum(value.numel() * value.itemsize for value in values)


def priced(run: RunConfig) -> dict[str, float]:
    found, where = query_from_run(run), cluster(2)
    era = where.hardware.era("eager")
    said = estimate(found.work, found.choices, where, era, found.practice)
    return {part.name: float(part.value[0]) for part in (*said.memory, *said.time)}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "fsdp2+zero2", "tp2", "pp2"])
def test_their_memory_is_that_of_the_rank_with_the_most(
    layout: str, precision: str, tmp_path: Path, pool: Any
) -> None:
    run = averaged(tmp_path, layout, **{"precision.compute": json.dumps(precision)})
    assert priced(run)[MemoryPart.AVERAGES] == max(pool.run(held_bytes, run, world=2))


def test_without_them_nothing_is_counted_and_a_step_is_shorter(tmp_path: Path) -> None:
    run = averaged(tmp_path, "dp2")
    without = run.model_copy(update={"train": run.train.model_copy(update={"ema": None})})
    both = priced(run), priced(without)
    assert both[1][MemoryPart.AVERAGES] == 0
    assert both[0][TimePart.OPTIMIZER] > 1.05 * both[1][TimePart.OPTIMIZER]
