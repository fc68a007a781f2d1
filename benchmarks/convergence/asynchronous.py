"""Asynchronous parameter servers beside the synchronous one, at equal wall-clock, with one slow
worker."""

from __future__ import annotations

import random
import time
from functools import partial
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from problems import DIM, PROBLEMS, RUNS, SIGMA2, SMOOTHNESS, Noisy, mean_value

import weft
from weft import sync
from weft.launch import local_workers

WORKERS = 4
STEP_S, SLOW_S = (
    0.02,
    0.2,
)  # that a step takes on most workers, and on the last: both are drawn, these are means
SECONDS = 30.0
RATE = 0.2
BOUNDS: tuple[int | str, ...] = (0, 2, 8, "none")  # of staleness; 0 is the synchronous server
MARKS = (1 / 8, 1 / 4, 1 / 2, 1)  # of SECONDS, when the gradient's norm is read


def worker(problem: str, staleness: int | str, seconds: float) -> dict[str, Any]:
    """One rank: when each of its steps ended and the squared norm of the gradient then, the mean
    over the runs."""
    model = Noisy(PROBLEMS[problem])
    made = sync.make_sync("parameter_server", staleness=staleness)
    plan = weft.plan(
        model, f"dp{WORKERS}", batch=WORKERS, loss=mean_value, sync=made, precision="fp64"
    )
    engine = weft.Engine(
        model,
        plan,
        optimizer=partial(torch.optim.SGD, lr=RATE),
        loss=mean_value,
        inputs=["noise"],
        device="cpu",
    )
    generator, chance = (
        torch.Generator().manual_seed(engine.data_rank),
        random.Random(engine.data_rank),
    )
    mean_s = SLOW_S if engine.data_rank == WORKERS - 1 else STEP_S
    dist.barrier()
    began, times, norms = time.monotonic(), [], []
    # with staleness 0 all stop after the same step
    while time.monotonic() - began < seconds if staleness != 0 else len(times) < seconds / SLOW_S:
        noise = torch.randn(1, RUNS, DIM, generator=generator, dtype=torch.float64) * sqrt(
            SIGMA2 / DIM
        )
        time.sleep(mean_s * chance.uniform(0.5, 1.5))
        engine.step({"noise": noise})
        times.append(time.monotonic() - began)
        norms.append(float(model.norms().mean()))
    stalest = engine.replicas.stalest or 0
    engine.gather(last=True)
    return {"times": times, "norms": norms, "stalest": stalest}


def measured() -> dict[str, Any]:
    """For each bound: steps taken, the most stale gradient, and the squared norm at some times."""
    rows = []
    for problem in PROBLEMS:
        for bound in BOUNDS:
            found = local_workers.run_workers(worker, WORKERS, problem, bound, SECONDS, threads=1)
            times, norms = found[0]["times"], found[0]["norms"]
            ends = [
                max(i for i, t in enumerate(times) if t <= mark * SECONDS or i == 0)
                for mark in MARKS
            ]
            # around a time: one step's norm is as noisy as its gradient
            read = [
                sum(norms[max(0, i - 9) : i + 1]) / len(norms[max(0, i - 9) : i + 1]) for i in ends
            ]
            rows.append(
                {
                    "problem": problem,
                    "staleness": bound,
                    "gradients": sum(len(each["times"]) for each in found),
                    "fast": len(times),
                    "slow": len(found[-1]["times"]),
                    "stalest": max(each["stalest"] for each in found),
                    "norms": read,
                }
            )
            print(rows[-1], flush=True)
    constants = {
        "L": SMOOTHNESS,
        "sigma2": SIGMA2,
        "workers": WORKERS,
        "step_s": STEP_S,
        "slow_s": SLOW_S,
        "rate": RATE,
        "marks_s": [mark * SECONDS for mark in MARKS],
    }
    return {"constants": constants, "rows": rows}


def holds(found: dict[str, Any]) -> bool:
    """Whether no gradient is staler than its bound."""
    return all(
        row["staleness"] == "none" or row["stalest"] <= row["staleness"] for row in found["rows"]
    )


def table(found: dict[str, Any]) -> list[str]:
    """In Markdown."""
    marks = " | ".join(f"norm at {mark:g} s" for mark in found["constants"]["marks_s"])
    lines = [
        "| problem | staleness | steps: a fast worker | the slow one | most stale gradient |"
        f" {marks} |"
    ]
    lines += [
        "| --- | ---: | ---: | ---: | ---: |" + " ---: |" * len(found["constants"]["marks_s"])
    ]
    for row in found["rows"]:
        norms = " | ".join(f"{norm:.4f}" for norm in row["norms"])
        lines.append(
            f"| {row['problem']} | {row['staleness']} | {row['fast']} | {row['slow']} |"
            f" {row['stalest']} | {norms} |"
        )
    return lines
