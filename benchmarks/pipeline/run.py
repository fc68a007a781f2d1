"""weft's pipeline runtime beside torch.distributed.pipelining's, in the same order of the same
stages, in one call.

    python benchmarks/pipeline/run.py [emulated] [compute]        both if none is named

After each row of a part its results/PART.json is written, and the tables in README.md anew from all
parts. Exits with 1 if a row misses its limit.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sides import Bare, Batch, Side, Torch, Weft
from stages import SIZE, WIDTH, Sleeps, alone, decoder_parts, real, sleepers, starts
from torch import Tensor

from weft.core.action_costs import ActionCosts
from weft.core.schedule import Action, Schedule
from weft.launch.local_workers import run_workers
from weft.nn.losses import next_token
from weft.pipeline import schedules
from weft.pipeline.simulator import simulate

HERE = Path(__file__).resolve().parent
RESULTS, README = HERE / "results", HERE / "README.md"
ACTION_S = 0.02
LIMIT = 0.03  # of the ideal, which the runtime may lose
WARMUP = 1  # steps, not measured: shapes are agreed upon
COMPUTE = ("1f1b", "gpipe", "zb-h1", "interleaved")
SAMPLES = 1  # of a microbatch of the decoder


Results = dict[str, Any]


def synchronous() -> list[str]:
    """All schedules of weft that end in one optimizer step."""
    return [
        name for name in schedules.registry() if not schedules.make_schedule(name, 2, 2).versions
    ]


# ---- one step, timed over all ranks --------------------------------------------------------------


def timed(side: Side, batch: Batch) -> tuple[float, Tensor | None]:
    """Seconds from a moment that all ranks agree on until the last one has taken its step; the
    step's loss."""
    gc.collect()
    dist.barrier()
    start = torch.tensor([time.perf_counter() + 0.01], dtype=torch.float64)
    dist.broadcast(start, 0)
    time.sleep(max(0.0, start.item() - time.perf_counter()))
    loss = side.step(batch)
    end = torch.tensor(
        [time.perf_counter()], dtype=torch.float64
    )  # one clock for all processes of a machine
    dist.all_reduce(end, dist.ReduceOp.MAX)
    return (end - start).item(), loss


def alternate(
    sides: dict[str, Side], batches: Callable[[int], Batch], repeats: int
) -> dict[str, list[float]]:
    """Seconds of each side's steps, taken in turn and on the same batches; losses must agree in the
    warm-up."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for step in range(WARMUP + repeats):
        batch, losses = batches(step), []
        for name in sorted(sides, reverse=step % 2 == 1):
            took, loss = timed(sides[name], batch)
            times[name].append(took)
            losses += [] if loss is None else [loss.item()]
        if step < WARMUP and len(losses) > 1:  # later, rounding has room to grow
            assert max(losses) - min(losses) <= 1e-4 * abs(max(losses)), (
                f"step {step}: the losses are {losses}"
            )
    return {name: taken[WARMUP:] for name, taken in times.items()}


# ---- emulated: stages that sleep -----------------------------------------------------------------


def emulated(
    names: Sequence[str], ranks: Sequence[int], microbatches: int, repeats: int
) -> Iterator[Results]:
    """Every schedule on every number of ranks: seconds of a step, and what is lost of the simulated
    ideal."""
    rows: list[dict[str, Any]] = []
    floor: dict[int, dict[str, float]] = {}
    for count in ranks:
        sleeps, floor[count] = calibrated(count)
        for name in names:
            # one microbatch after the other: few of them show as much, and take long enough
            made = schedules.make_schedule(
                name, count, microbatches // 4 if name == "naive" else microbatches
            )
            late = floor[count]["sleep"] * ACTION_S
            times = run_workers(_sleep, count, made, sleeps, late, repeats, threads=1)[0]
            ideal = simulate(made, costs_of(made)).makespan_s
            loss = {side: statistics.median(taken) / ideal - 1 for side, taken in times.items()}
            rows.append(
                {
                    "schedule": name,
                    "ranks": count,
                    "stages": made.stages,
                    "microbatches": made.microbatches,
                    "ideal_s": ideal,
                    "step_s": {side: statistics.median(taken) for side, taken in times.items()},
                    "loss": loss,
                    "held": loss["weft"] <= min(LIMIT, loss["torch"]),
                    "times_s": times,
                }
            )
            print(
                f"pp{count} {name}: lost by"
                f" {', by '.join(f'{s} {x:.2%}' for s, x in loss.items())}",
                flush=True,
            )
            yield {
                "action_s": ACTION_S,
                "message_bytes": 4 * WIDTH,
                "repeats": repeats,
                "limit": LIMIT,
                "floor": floor,
                "rows": rows,
            }


def costs_of(made: Schedule) -> ActionCosts:
    """What the actions take. For the first stage's input nobody waits: both sides leave a split
    backward to its W."""
    whole, rest = [ACTION_S] * made.stages, [ACTION_S] * (made.stages - 1)
    return ActionCosts(forward_s=whole, backward_s=[0.0, *rest], weight_s=[2 * ACTION_S, *rest])


def _sleep(made: Schedule, sleeps: Sleeps, late: float, repeats: int) -> dict[str, list[float]]:
    batch = {key: torch.ones(made.microbatches, WIDTH) for key in ("input", "target")}
    sample = {key: value[:1] for key, value in batch.items()}
    cut = [str(stage) for stage in range(1, made.stages)]
    costs, split = (
        costs_of(made),
        {a[1:] for actions in made.order for a in actions if a.kind == "W"},
    )
    each: dict[str, Any] = {"F": costs.forward_s, "B": costs.backward_s, "W": costs.weight_s}

    def took(action: Action) -> float:
        parts = action.kind if action.kind == "F" or action[1:] in split else "BW"
        return max(0.0, sum(each[part][action.stage] for part in parts) - late)

    sides: dict[str, Side] = {
        "bare": Bare(made, took, WIDTH),
        "torch": Torch(sleepers(made.stages, sleeps), made, "input", "target", _sum),
        "weft": Weft(sleepers(made.stages, sleeps), cut, made, made.microbatches, sample, _sum),
    }
    return alternate(sides, lambda step: batch, repeats)


def _sum(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return output.sum(), torch.tensor(float(output.numel()))


def calibrated(ranks: int) -> tuple[Sleeps, dict[str, float]]:
    """Sleeps with which a stage alone, in as many processes at once, takes its time: what autograd
    and late wake-ups add there is the stage's own. And the floor, as shares: how late a sleep ends,
    and what such a stage still adds.
    """
    asked = Sleeps(ACTION_S, ACTION_S)
    sleeps = Sleeps(
        *(2 * ask - took for ask, took in zip(asked, _alone_on(ranks, asked), strict=True))
    )
    left = _alone_on(ranks, sleeps)
    late = statistics.median(run_workers(_overshoot, ranks, threads=1))
    return sleeps, {
        "sleep": late,
        "stage": (left.forward_s + 2 * left.backward_s) / (3 * ACTION_S) - 1,
    }


def _alone_on(ranks: int, sleeps: Sleeps) -> Sleeps:
    """Medians over the ranks."""
    return Sleeps(
        *map(statistics.median, zip(*run_workers(_alone, ranks, sleeps, threads=1), strict=True))
    )


def _alone(sleeps: Sleeps) -> Sleeps:
    dist.barrier()
    return alone(sleeps, rounds=30)


def _overshoot() -> float:
    """By which share of what was asked the sleeps of this process last longer, while all ranks
    sleep: the median."""
    times = []
    dist.barrier()
    for _ in range(50):
        start = time.perf_counter()
        time.sleep(ACTION_S)
        times.append(time.perf_counter() - start)
    return statistics.median(times) / ACTION_S - 1


# ---- compute: a decoder on two ranks -------------------------------------------------------------


def compute(names: Sequence[str], microbatches: int, pairs: int) -> Iterator[Results]:
    """Tokens per second of both sides, and their ratio in every pair of steps."""
    rows: list[dict[str, Any]] = []
    for name in names:
        made = schedules.make_schedule(name, 2, microbatches)
        times = run_workers(_train, 2, made, pairs, threads=1)[0]
        tokens = microbatches * SAMPLES * SIZE["seq_len"]
        ratio = quartiles(t / w for t, w in zip(times["torch"], times["weft"], strict=True))
        rows.append(
            {
                "schedule": name,
                "stages": made.stages,
                "tokens_per_s": {
                    side: tokens / statistics.median(taken) for side, taken in times.items()
                },
                "ratio": ratio,
                "held": ratio["median"] >= 1,
                "times_s": times,
            }
        )
        print(f"{name}: throughput weft / torch = {spread(ratio)}", flush=True)
        yield {
            "model": SIZE,
            "microbatches": microbatches,
            "samples": SAMPLES,
            "pairs": pairs,
            "rows": rows,
        }


def _train(made: Schedule, pairs: int) -> dict[str, list[float]]:
    cut = [f"blocks.{start}" for start in starts(made.stages)[1:]]
    count = made.microbatches * SAMPLES
    sample = {key: value[:1] for key, value in _text(count, 0).items()}
    sides: dict[str, Side] = {
        "torch": Torch(decoder_parts(real(), made.stages), made, "input_ids", "labels", next_token),
        "weft": Weft(real(), cut, made, count, sample, next_token),
    }
    return alternate(sides, partial(_text, count), pairs)


def _text(samples: int, step: int) -> Batch:
    """{"input_ids", "labels"}: int64 [samples, seq_len]; random tokens, the same on every rank."""
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(SIZE["vocab"], (samples, SIZE["seq_len"] + 1), generator=draw)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def quartiles(values: Iterable[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"low": low, "median": median, "high": high}


# ---- results and README --------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": os.getloadavg()[0],
    }


def table(results: dict[str, Results]) -> str:
    """The tables of README.md, in Markdown."""
    lines: list[str] = []
    if found := results.get("emulated"):
        columns = [
            "emulated",
            "stages",
            "ideal, s",
            "weft, s",
            "torch, s",
            "lost: weft",
            "torch",
            "bare",
            "weft - bare",
        ]
        columns += ["at most", "held"]
        lines += [f"| {' | '.join(columns)} |", f"| --- |{' ---: |' * (len(columns) - 2)} --- |"]
        for row in found["rows"]:
            took, loss = row["step_s"], row["loss"]
            shares = [loss["weft"], loss["torch"], loss["bare"], loss["weft"] - loss["bare"]]
            cells = [f"pp{row['ranks']} {row['schedule']}", row["stages"], f"{row['ideal_s']:.3f}"]
            cells += [
                f"{took['weft']:.3f}",
                f"{took['torch']:.3f}",
                *(f"{share:.2%}" for share in shares),
            ]
            cells += [f"{min(found['limit'], loss['torch']):.2%}", verdict(row)]
            lines.append(f"| {' | '.join(map(str, cells))} |")
        lines += ["", "| floor, with no runtime | a sleep is late by | a stage takes longer by |"]
        lines += ["| --- | ---: | ---: |"]
        lines += [
            f"| {n} processes | {f['sleep']:.2%} | {f['stage']:.2%} |"
            for n, f in found["floor"].items()
        ]
    if found := results.get("compute"):
        lines += [
            "",
            (
                "| compute, pp2 | stages | torch, tokens/s | weft, tokens/s | weft / torch, median"
                " (quartiles) |"
            ),
        ]
        lines[-1] += " at least | held |"
        lines += ["| --- | ---: | ---: | ---: | ---: | ---: | --- |"]
        for row in found["rows"]:
            speed = row["tokens_per_s"]
            lines.append(
                f"| {row['schedule']} | {row['stages']} | {speed['torch']:.0f} |"
                f" {speed['weft']:.0f} | {spread(row['ratio'])} | 1 | {verdict(row)} |"
            )
    return "\n".join(lines).strip()


def verdict(row: Results) -> str:
    return "yes" if row["held"] else "FAIL"


def spread(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.3f} ({ratio['low']:.3f} - {ratio['high']:.3f})"


def write_readme() -> str:
    """Put the tables of all results between README.md's two markers; the tables."""
    tables = table({path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")})
    begin, end = "<!-- results: written by run.py -->", "<!-- end of results -->"
    before, rest = README.read_text().split(begin)
    _, after = rest.split(end)
    README.write_text(f"{before}{begin}\n\n{tables}\n\n{end}{after}")
    return tables


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="emulated, compute; both if none is named"
    )
    parser.add_argument("--schedules", nargs="+", help="names; default: all that apply")
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=[4, 8], help="of the emulated pipelines"
    )
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument(
        "--repeats", type=int, default=5, help="emulated steps that are measured, of each side"
    )
    parser.add_argument(
        "--pairs", type=int, default=20, help="pairs of steps of the decoder that are measured"
    )
    options = parser.parse_args()
    count = options.microbatches
    parts: dict[str, Callable[[], Iterator[Results]]] = {
        "emulated": lambda: emulated(
            options.schedules or synchronous(), options.ranks, count, options.repeats
        ),
        "compute": lambda: compute(options.schedules or COMPUTE, count, options.pairs),
    }
    if unknown := set(options.parts) - set(parts):
        parser.error(f"no part {', '.join(sorted(unknown))}: choose from {', '.join(parts)}")
    RESULTS.mkdir(exist_ok=True)
    held = True
    for name in options.parts or parts:
        about = {
            "environment": environment(),
            "command": f"python benchmarks/pipeline/run.py {' '.join(sys.argv[1:])}".strip(),
        }
        for found in parts[name]():
            (RESULTS / f"{name}.json").write_text(json.dumps(about | found, indent=1) + "\n")
            write_readme()
            held = held and found["rows"][-1]["held"]
    print(write_readme())
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
