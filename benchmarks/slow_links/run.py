"""Replicas over slow links: how soon each way to agree reaches the loss that plain DDP has after 600 steps.

    python benchmarks/slow_links/run.py                              all of it: some two hours on 2 cores
    python benchmarks/slow_links/run.py time --rates 25 --sides "torch ddp" "weft int4"
    python benchmarks/slow_links/run.py train --steps 300

`train` runs each side once without a limit, for its loss by steps. What a step computes does not depend on the link, so
`time` measures seconds and bytes of a step on each link alone, and the table multiplies: steps to the loss x seconds of a
step. Results of runs that were made before and are not made now stay.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import testbed  # noqa: E402
import torch
from sides import PERIOD, SIDES, WARMUP

HERE = Path(__file__).resolve().parent
RESULTS, README = HERE / "results" / "slow_links.json", HERE / "README.md"
RATES = (1000.0, 100.0, 25.0)  # Mbit/s
TARGET, STEPS, EVAL_EVERY = 600, 900, 25
WARM, TIMED = 4, 12  # steps before those that are timed, and at least so many of them


def train(side: str, replicas: int, steps: int) -> dict:
    """Loss by steps, on links without a limit."""
    testbed.limit(replicas, None)
    found = _worker(side, replicas, steps, EVAL_EVERY, timeout_s=3.0 * steps + 120)
    return {"val_loss": found["val_loss"], "loss": found["loss"]}


def timed(side: str, replicas: int, rate: float) -> dict:
    """Seconds and bytes of a step on links of this rate, as means over whole periods: exchanges come now and then."""
    testbed.limit(replicas, rate)
    sync = SIDES[side].weft
    period = int(sync[2].get("period", 1)) if sync is not None else PERIOD
    warm = WARM if sync is not None else WARMUP + WARM  # torch's hooks begin later than the first step
    count = period * -(-TIMED // period)
    found = _worker(side, replicas, warm + count, 10**6, timeout_s=1800)
    sent = found["sent_bytes"]
    return {"step_s": statistics.mean(found["step_s"][warm:]), "sent_bytes": (sent[-1] - sent[warm - 1]) / count}


def _worker(side: str, replicas: int, steps: int, eval_every: int, timeout_s: float) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.json"
        command = [sys.executable, str(HERE / "worker.py"), side, str(steps), str(eval_every), str(output)]
        testbed.run(replicas, command, timeout_s, {"TORCH_DISTRIBUTED_DEBUG": "OFF"})
        return json.loads(output.read_text())


def steps_to(losses: dict[str, float], target: float) -> float | None:
    """The steps after which the validation loss is first at most the target, between two evaluations by a line."""
    before: tuple[int, float] | None = None
    for step, loss in sorted((int(s), loss) for s, loss in losses.items()):
        if loss <= target:
            if before is None:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
        before = step, loss
    return None


def table(results: dict, replicas: int) -> list[str]:
    runs = results.get(str(replicas), {})
    curve = runs.get("train", {}).get("torch ddp", {}).get("val_loss", {})
    target = curve.get(str(TARGET))
    lines = [
        "| side | steps to the loss | loss at 600 | " + " | ".join(f"{r:g} Mbit/s: MB, s a step | h to the loss | x DDP" for r in RATES) + " |",
        "| --- | ---: | ---: |" + " ---: | ---: | ---: |" * len(RATES),
    ]  # fmt: skip
    for side in SIDES:
        losses = runs.get("train", {}).get(side, {}).get("val_loss", {})
        needed = steps_to(losses, target) if target is not None else None
        cells = [side, "-" if needed is None else f"{needed:.0f}", f"{losses[str(TARGET)]:.3f}" if str(TARGET) in losses else "-"]  # fmt: skip
        for rate in RATES:
            here = runs.get("time", {}).get(f"{rate:g}", {})
            took, plain = here.get(side), here.get("torch ddp")
            if took is None:
                cells += ["-", "-", "-"]
                continue
            cells.append(f"{took['sent_bytes'] / 1e6:.2f}, {took['step_s']:.2f}")
            cells.append("-" if needed is None else f"{needed * took['step_s'] / 3600:.3f}")
            ratio = plain["step_s"] * TARGET / (needed * took["step_s"]) if needed and plain else None
            cells.append("-" if ratio is None else f"{ratio:.1f}")
        if len(set(cells)) > 2:
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("parts", nargs="*", choices=["time", "train"], default=["time", "train"])
    arguments.add_argument("--sides", nargs="+", choices=[*SIDES], default=[*SIDES])
    arguments.add_argument("--rates", nargs="+", type=float, default=[*RATES])
    arguments.add_argument("--replicas", nargs="+", type=int, default=[2])
    arguments.add_argument("--steps", type=int, default=STEPS)
    options = arguments.parse_args()
    missing = testbed.lacking()
    if missing is not None:
        print(f"skipped: {missing}")
        return 0
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results["machine"] = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    for replicas in options.replicas:
        with testbed.hosts(replicas):
            runs = results.setdefault(str(replicas), {})
            for side in options.sides:
                for part in options.parts:
                    if part == "train":
                        runs.setdefault("train", {})[side] = train(side, replicas, options.steps)
                    for rate in options.rates if part == "time" else ():
                        runs.setdefault("time", {}).setdefault(f"{rate:g}", {})[side] = took = timed(side, replicas, rate)
                        print(f"{side}, {replicas} replicas, {rate:g} Mbit/s: {took}", flush=True)
                    RESULTS.parent.mkdir(exist_ok=True)
                    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print("\n".join(table(results, replicas)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
