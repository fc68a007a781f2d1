"""M workers on problems whose smoothness and noise are known: measured gradient norms beside the
bound of SGD.

    python benchmarks/convergence/run.py [synchronous] [asynchronous]  # about 8 minutes on 2 cores

Each part writes results/PART.json; the tables in README.md are then written anew from all of them.
Exit code 1 if a measured mean is above its bound, or a gradient is staler than its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import asynchronous
import torch
from problems import DIM, PROBLEMS, RUNS, SIGMA2, SMOOTHNESS, START, Noisy, mean_value

import weft
from weft import sync
from weft.launch import local_workers

HERE = Path(__file__).resolve().parent
RESULTS, README = HERE / "results", HERE / "README.md"
WORKERS = (1, 2, 4, 8)
BEGIN, END = "<!-- results: written by run.py -->", "<!-- end of results -->"


def worker(problem: str, workers: int, name: str, rate: float, steps: int) -> list[float]:
    """One rank: [steps], the squared norm of the gradient before each step, the mean over the
    runs."""
    model = Noisy(PROBLEMS[problem])
    plan = weft.plan(
        model,
        f"dp{workers}",
        batch=workers,
        loss=mean_value,
        sync=sync.make_sync(name),
        precision="fp64",
    )
    engine = weft.Engine(
        model,
        plan,
        optimizer=partial(torch.optim.SGD, lr=rate),
        loss=mean_value,
        inputs=["noise"],
        device="cpu",
    )
    generator = torch.Generator().manual_seed(1000 * workers + engine.data_rank)
    found = []
    for _ in range(steps):
        found.append(float(model.norms().mean()))
        noise = torch.randn(1, RUNS, DIM, generator=generator, dtype=torch.float64) * sqrt(
            SIGMA2 / DIM
        )
        engine.step({"noise": noise})
    return found


def synchronous(name: str, steps: int) -> dict[str, Any]:
    """Mean squared gradient norm over all steps beside its bound, at the rate with the least bound,
    and at one rate for all M; there the second half of the steps shows what the noise leaves."""
    rows = []
    for problem, value in PROBLEMS.items():
        start = float(value(torch.full((DIM,), START, dtype=torch.float64)))
        common = best_rate(start, 1, steps)
        for workers in WORKERS:
            for kind, rate in (("best", best_rate(start, workers, steps)), ("common", common)):
                if workers == 1 and kind == "common":  # the same
                    rows.append({**rows[-1], "rate_of": kind})
                    continue
                found = local_workers.run_workers(
                    worker, workers, problem, workers, name, rate, steps, threads=1
                )
                assert all(each == found[0] for each in found), (
                    "the replicas' weights are not equal"
                )
                norms = found[0]
                rows.append(
                    {
                        "problem": problem,
                        "workers": workers,
                        "rate_of": kind,
                        "rate": rate,
                        "measured": sum(norms) / steps,
                        "late": sum(norms[steps // 2 :]) / (steps - steps // 2),
                        "bound": 2 * start / (rate * steps) + SMOOTHNESS * rate * SIGMA2 / workers,
                        "noise_term": SMOOTHNESS * rate * SIGMA2 / workers,
                    }
                )
                print(rows[-1], flush=True)
    constants = {
        "L": SMOOTHNESS,
        "sigma2": SIGMA2,
        "steps": steps,
        "runs": RUNS,
        "dim": DIM,
        "sync": name,
    }
    return {"constants": constants, "rows": rows}


def best_rate(start: float, workers: int, steps: int) -> float:
    """The step size at most 1 / L with the least bound."""
    return min(1 / SMOOTHNESS, sqrt(2 * start * workers / (SMOOTHNESS * SIGMA2 * steps)))


def holds(results: dict[str, dict[str, Any]]) -> bool:
    bounded = all(
        row["measured"] <= row["bound"] for row in results.get("synchronous", {}).get("rows", ())
    )
    return bounded and (
        "asynchronous" not in results or asynchronous.holds(results["asynchronous"])
    )


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """The tables of README.md, in Markdown."""
    lines: list[str] = []
    if found := results.get("synchronous"):
        rows = found["rows"]
        lines += [
            "| problem | M | rate | mean squared gradient norm | bound | held | times sqrt(M T) |"
        ]
        lines += ["| --- | ---: | ---: | ---: | ---: | --- | ---: |"]
        for row in (row for row in rows if row["rate_of"] == "best"):
            verdict = "yes" if row["measured"] <= row["bound"] else "FAIL"
            scaled = row["measured"] * sqrt(row["workers"] * found["constants"]["steps"])
            lines.append(
                f"| {row['problem']} | {row['workers']} | {row['rate']:.4f} | {row['measured']:.4f}"
                f" | {row['bound']:.4f} | {verdict} | {scaled:.2f} |"
            )
        lines += [
            "",
            (
                "| problem | M | rate | mean squared gradient norm | bound | held | second half |"
                " x M |"
            ),
        ]
        lines += ["| --- | ---: | ---: | ---: | ---: | --- | ---: | ---: |"]
        for row in (row for row in rows if row["rate_of"] == "common"):
            verdict = "yes" if row["measured"] <= row["bound"] else "FAIL"
            lines.append(
                f"| {row['problem']} | {row['workers']} | {row['rate']:.4f} | {row['measured']:.4f}"
                f" | {row['bound']:.4f} | {verdict} | {row['late']:.4f} |"
                f" {row['late'] * row['workers']:.4f} |"
            )
    if found := results.get("asynchronous"):
        lines += ["", *asynchronous.table(found)]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help="synchronous or asynchronous; both if none is named",
    )
    parser.add_argument(
        "--sync", default="allreduce", help="weft's synchroniser; one that agrees in every step"
    )
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "synchronous": partial(synchronous, options.sync, options.steps),
        "asynchronous": asynchronous.measured,
    }
    if unknown := set(options.parts) - set(parts):
        parser.error(f"no part {', '.join(sorted(unknown))}: choose from {', '.join(parts)}")
    RESULTS.mkdir(exist_ok=True)
    for name in options.parts or parts:
        environment = {
            "cpus": os.cpu_count(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        command = f"python benchmarks/convergence/run.py {' '.join(sys.argv[1:])}".strip()
        result = {"environment": environment, "command": command, **parts[name]()}
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    results = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    text = README.read_text(encoding="utf-8")
    head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    README.write_text("\n".join([head, "", *table(results), "", tail]), encoding="utf-8")
    print("\n".join(table(results)))
    return 0 if holds(results) else 1


if __name__ == "__main__":
    sys.exit(main())
