"""What is run: weft's decoder in three sizes, on every layout of two ranks, and what a rank sees of
it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from weft.core import run_config
from weft.engine import Engine
from weft.planner.calibrate.cpu_contention import CpuLoadSample
from weft.train import build, build_data
from weft.train.comm_metrics import CommMetrics
from weft.train.metrics import peak_memory_bytes

FILE = Path(__file__).parent / "decoder.toml"
SIZES: dict[str, dict[str, int]] = {
    "small": {"dim": 128, "layers": 4, "heads": 4, "seq_len": 128, "vocab": 256},
    "medium": {"dim": 256, "layers": 6, "heads": 8, "seq_len": 256, "vocab": 2048},
    "large": {"dim": 512, "layers": 8, "heads": 8, "seq_len": 128, "vocab": 8192},
}
# layout, microbatches of a step, what is computed again
LAYOUTS = (
    ("dp2", 1, "none"),
    ("dp2", 1, "full"),
    ("dp2", 4, "none"),
    ("fsdp2", 1, "none"),
    ("fsdp2", 1, "full"),
    ("fsdp2+zero2", 1, "none"),
    ("fsdp2+zero1", 2, "none"),
    ("tp2", 1, "none"),
    ("tp2", 1, "full"),
    ("tp2+sequence", 1, "none"),
    ("pp2", 4, "none"),
    ("pp2", 4, "full"),
    ("pp2", 8, "none"),
)
WARMUP, CLEAN, MOST = 3, 5, 10  # steps; samples that nobody disturbed, of at most so many
SAMPLE_S = 0.3
QUIET = 0.06  # the share of the processors' time that others may have
LOOK_S, PATIENCE_S = 0.2, 4.0


@dataclass(frozen=True)
class Case:
    size: str
    layout: str
    accumulate: int
    recompute: str

    def __str__(self) -> str:
        return f"{self.size} {self.layout} m{self.accumulate} {self.recompute}"

    def run(self) -> run_config.RunConfig:
        """As `weft train` would have it."""
        sizes = {f"model.{key}": str(value) for key, value in SIZES[self.size].items()}
        text = {"layout.axes": f'"{self.layout}"', "train.recompute": f'"{self.recompute}"'}
        length = {"data.seq_len": sizes["model.seq_len"], "train.accumulate": str(self.accumulate)}
        return run_config.load_run(FILE, sizes | text | length)


CASES = tuple(Case(size, *layout) for size in SIZES for layout in LAYOUTS)


def steps(case: Case) -> dict[str, Any]:
    """A rank's part of some optimizer steps: seconds of one, from when all are ready until this
    rank is done, in each of a few samples, with the share of the processors' time that other
    programs had meanwhile; the most memory that it held; bytes that it sent in one over each axis.
    """
    run = case.run()
    data = build_data.build_dataset(run)
    model, sample = build.build_model(run, dtype=torch.float32), build_data.sample_batch(run, data)
    plan = build.build_plan(run, model, sample)
    engine = Engine(
        model, plan, optimizer=build.build_optimizer(run), loss=build.build_loss(run), sample=sample
    )
    whole = {key: torch.stack([data[i][key] for i in range(run.train.batch)]) for key in data[0]}
    traffic, mine, samples = CommMetrics(engine), engine.local(whole), list[tuple[float, float]]()
    for _ in range(WARMUP):
        began = time.perf_counter()
        with traffic.step():
            engine.step(mine)
    count = int(agreed(max(1.0, SAMPLE_S / (time.perf_counter() - began))))
    while len(samples) < MOST and sum(others < QUIET for _, others in samples) < CLEAN:
        quiet()
        dist.barrier()
        since, own = CpuLoadSample.now(), time.process_time()
        began = time.perf_counter()
        for _ in range(count):
            engine.step(mine)
        took = (time.perf_counter() - began) / count
        samples.append((took, agreed(since.others(2 * agreed(time.process_time() - own)))))
    memory = peak_memory_bytes(torch.device("cpu"))
    return {"samples": samples, "memory_bytes": memory, "sent": traffic.by_axis}


def agreed(number: float) -> float:
    """The mean of both ranks' numbers."""
    shared = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(shared)
    return float(shared) / 2


def quiet() -> None:
    """Wait until other programs rest, or for as long as it is worth."""
    for _ in range(int(PATIENCE_S / LOOK_S)):
        since = CpuLoadSample.now()
        time.sleep(LOOK_S)
        if agreed(since.others(0.0)) < QUIET:
            return


def found(case: Case, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Of both ranks: a step is done when the slower one is. The samples in which others had least
    of the processors."""
    pairs = zip(*(rank["samples"] for rank in ranks), strict=True)
    samples = sorted((others, max(a, b)) for (a, others), (b, _) in pairs)[:CLEAN]
    return {
        **asdict(case),
        "step_s": median(took for _, took in samples),
        "others": samples[-1][0],
        "memory_bytes": max(rank["memory_bytes"] for rank in ranks),
        "sent": ranks[0]["sent"],
    }
