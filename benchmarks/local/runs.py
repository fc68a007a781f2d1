"""What is run: weft's decoder in three sizes, on every layout of two ranks, and what a rank sees of it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import weft
from weft.calibrate.others import Moment
from weft.engine import Engine
from weft.losses import next_token
from weft.models import decoder
from weft.train.metrics import peak_memory_bytes
from weft.train.traffic import Traffic

SIZES: dict[str, dict[str, int]] = {
    "small": {"dim": 128, "layers": 4, "heads": 4, "seq_len": 128, "vocab": 256},
    "medium": {"dim": 256, "layers": 6, "heads": 8, "seq_len": 256, "vocab": 2048},
    "large": {"dim": 512, "layers": 8, "heads": 8, "seq_len": 128, "vocab": 8192},
}
BATCH = 8
# layout, microbatches of a step
LAYOUTS = (
    ("dp2", 1), ("dp2", 4), ("fsdp2", 1), ("fsdp2", 4), ("fsdp2+zero2", 1), ("fsdp2+zero1", 1),
    ("tp2", 1), ("tp2+sequence", 1), ("pp2", 4), ("pp2", 8),
)  # fmt: skip
WARMUP, CLEAN, MOST = 3, 5, 12  # steps; samples that nobody disturbed, of at most so many
SAMPLE_S = 0.3
QUIET = 0.06  # the share of the processors' time that others may have
LOOK_S, PATIENCE_S = 0.2, 6.0


@dataclass(frozen=True)
class Case:
    size: str
    layout: str
    accumulate: int
    recompute: str

    def __str__(self) -> str:
        return f"{self.size} {self.layout} m{self.accumulate} {self.recompute}"


CASES = tuple(Case(size, *layout, recompute)
              for size in SIZES for layout in LAYOUTS for recompute in ("none", "full"))  # fmt: skip


def steps(case: Case) -> dict[str, Any]:
    """A rank's part of some optimizer steps: seconds of one, from when all are ready until this rank is done, in each
    of a few samples, with the share of the processors' time that other programs had meanwhile; the most memory that it
    held; bytes that it sent in one over each axis."""
    torch.manual_seed(0)
    model = decoder(**SIZES[case.size])
    length, vocab = SIZES[case.size]["seq_len"], SIZES[case.size]["vocab"]
    batch = dict.fromkeys(("input_ids", "labels"), torch.randint(0, vocab, (BATCH, length)))
    plan = weft.plan(
        model, case.layout, batch=BATCH, accumulate=case.accumulate, recompute=case.recompute, loss=next_token,
        sample={key: value[:1] for key, value in batch.items()},
    )  # fmt: skip
    adamw = partial(torch.optim.AdamW, lr=1e-4)
    engine = Engine(model, plan, optimizer=adamw, loss=next_token)
    traffic, mine, samples = Traffic(engine), engine.local(batch), list[tuple[float, float]]()
    for _ in range(WARMUP):
        began = time.perf_counter()
        with traffic.step():
            engine.step(mine)
    count = int(agreed(max(1.0, SAMPLE_S / (time.perf_counter() - began))))
    while len(samples) < MOST and sum(others < QUIET for _, others in samples) < CLEAN:
        quiet()
        dist.barrier()
        since, own = Moment.now(), time.process_time()
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
        since = Moment.now()
        time.sleep(LOOK_S)
        if agreed(since.others(0.0)) < QUIET:
            return


def found(case: Case, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Of both ranks: a step is done when the slower one is. The samples in which others had least of the processors."""
    samples = [
        (max(times), others[0]) for times, others in (zip(*pair) for pair in zip(*(r["samples"] for r in ranks)))
    ]
    best = sorted(samples, key=lambda each: each[1])[:CLEAN]
    return {
        **asdict(case),
        "step_s": median(took for took, _ in best),
        "others": max(others for _, others in best),
        "samples": len(samples),
        "memory_bytes": max(rank["memory_bytes"] for rank in ranks),
        "sent": ranks[0]["sent"],
    }
