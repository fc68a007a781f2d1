"""weft's optimizer step, memory and start-up beside hand-written plain torch, side by side in one
call.

    python benchmarks/overhead/run.py [check] [calls] [steps] [memory] [startup]  # all by default
    python benchmarks/overhead/run.py steps --cases tp2 pp2  # the other rows stay as they are

Each part writes results/PART.json; the tables in README.md are then written anew from all of them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import plain_ddp
import plain_fsdp2
import plain_pp
import plain_single
import plain_tp
import torch
import torch.distributed as dist
import work
from calls import calls_of, more
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
RESULTS, README = HERE / "results", HERE / "README.md"
WORLD = 2
CLIP = 1.0
STEP_SIZE = {"dim": 256, "layers": 4, "heads": 8, "seq_len": 256}
STEP_BATCH = 8
MEMORY_SIZE = {"dim": 512, "layers": 8, "heads": 8, "seq_len": 64}
MEMORY_BATCH = 2
START_SIZE = {"dim": 128, "layers": 2, "heads": 4, "seq_len": 128}
START_BATCH = 4
START_LIMIT = 1.3
CALLS_LIMIT = 1.01
WARMUP = 5  # steps, not measured


class Side(Protocol):
    """One trainer under measurement."""

    def step(self, batch: dict[str, Tensor], /) -> Any: ...


def step_model() -> nn.Module:
    return work.build(**STEP_SIZE)


@dataclass(frozen=True)
class Case:
    """A parallelism: weft's name for it, the plain side, and how much longer weft's step may
    take."""

    name: str
    layout: str
    trainer: Callable[[nn.Module, work.MakeOptimizer, float | None, bool], Side]
    limit: float
    divides_batch: bool  # whether each rank takes its own rows, or all take the whole batch
    is_cut: Callable[[nn.Parameter], bool]  # whether a rank holds a part of this parameter only
    compiled: bool = False  # whether both sides compile blocks and loss
    build: Callable[[], nn.Module] = step_model  # for steps and calls
    accumulate: int = 1  # microbatches

    def local(self, batch: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
        return work.rows_of(batch, rank, WORLD) if self.divides_batch else batch

    def state_bytes(self, model: nn.Module) -> int:
        """Weights, gradients and AdamW's two moments that one rank must hold."""
        return sum(4 * p.nbytes // (WORLD if self.is_cut(p) else 1) for p in model.parameters())


def single(
    model: nn.Module, optimizer: work.MakeOptimizer, clip: float | None, compiled: bool
) -> Side:
    return plain_single.Trainer(model, optimizer, clip, compiled=compiled)


CASES = (
    Case("DDP", "dp2", plain_ddp.trainer, 1.02, divides_batch=True, is_cut=lambda p: False),
    Case("FSDP2", "fsdp2", plain_fsdp2.trainer, 1.02, divides_batch=True, is_cut=lambda p: True),
    Case(
        "tensor parallel",
        "tp2",
        plain_tp.Trainer,
        1.05,
        divides_batch=False,
        is_cut=lambda p: p.dim() > 1,
    ),
    Case(
        "pipeline, 1F1B",
        "pp2",
        plain_pp.Trainer,
        1.02,
        divides_batch=False,
        is_cut=lambda p: True,  # each parameter is one rank's
        accumulate=plain_pp.MICROBATCHES,
    ),
)
COMPILED = tuple(replace(case, name=f"{case.name}, compiled", compiled=True) for case in CASES)
LLAMA = tuple(
    replace(case, name=f"{case.name}, Llama", build=partial(work.llama, STEP_SIZE["seq_len"]))
    for case in CASES[:2]
)
SINGLE = (
    Case("one device", "dp1", single, 1.02, divides_batch=False, is_cut=lambda p: False),
    Case(
        "one device, Llama",
        "dp1",
        single,
        1.02,
        divides_batch=False,
        is_cut=lambda p: False,
        build=LLAMA[0].build,
    ),
)
TIMED = (*CASES, *COMPILED, *LLAMA)


# ---- the two sides -------------------------------------------------------------------------------


class Weft:
    """weft's Engine as a Side."""

    def __init__(
        self,
        model: nn.Module,
        case: Case,
        batch: int,
        optimizer: work.MakeOptimizer,
        clip: float,
        precision: str,
    ):
        import weft
        from weft.nn.losses import next_token

        sample = work.batch_of(work.Text(24), 2, 0)  # along which a pipeline is cut
        plan = weft.plan(
            model,
            case.layout,
            batch=batch,
            accumulate=case.accumulate,
            loss=next_token,
            precision=precision,
            sample=sample,
        )
        self.engine = weft.Engine(
            model,
            plan,
            optimizer=optimizer,
            loss=next_token,
            clip=clip,
            compile="blocks" if case.compiled else "off",
        )

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.engine.step(batch).loss


def side(
    name: str,
    case: Case,
    model: nn.Module,
    batch: int,
    optimizer: work.MakeOptimizer = work.adamw,
    clip: float = CLIP,
    precision: str = "fp32",
) -> Side:
    if name == "weft":
        return Weft(model, case, batch, optimizer, clip, precision)
    return case.trainer(model, optimizer, clip, case.compiled)


# ---- two processes -------------------------------------------------------------------------------


def on_ranks(function: Callable[..., Any], *arguments: Any, world: int = WORLD) -> list[Any]:
    """function(rank, *arguments) on each of `world` ranks, one thread each; the results in rank
    order.

    Raises RuntimeError with the first error of any rank.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        processes = [
            context.Process(
                target=_rank,
                args=(rank, world, f"file://{folder}/store", pipes[rank][1], function, arguments),
            )
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        results: dict[int, Any] = {}
        try:
            waiting = {receiver: rank for rank, (receiver, _) in enumerate(pipes)}
            while waiting:
                for ready in multiprocessing.connection.wait(list(waiting)):
                    assert isinstance(ready, multiprocessing.connection.Connection)
                    rank = waiting.pop(ready)
                    try:
                        results[rank], error = ready.recv()
                    except EOFError:
                        error = "the process ended without a result"
                    if error:
                        raise RuntimeError(f"rank {rank}:\n{error}")
        finally:
            for process in processes:
                if len(results) < world:
                    process.kill()
                process.join()
    return [results[rank] for rank in range(world)]


def _rank(
    rank: int,
    world: int,
    store: str,
    sender: Any,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(minutes=5)
        )
        sender.send((function(rank, *arguments), None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        sender.send((None, traceback.format_exc()))
        os._exit(1)  # a peer may wait in a collective that this rank never joins


# ---- check: both sides, and one device, give the same numbers ------------------------------------


def check() -> dict[str, Any]:
    """Losses of a few float64 steps: relative difference of each side from one device."""
    rows = []
    for case in CASES:
        for name in ("plain", "weft"):
            difference = max(on_ranks(_difference, case, name))
            rows.append(
                {"case": case.name, "layout": case.layout, "side": name, "loss_rel_err": difference}
            )
            assert difference < 1e-9, (
                f"{name} {case.name} differs from one device by {difference:.1e}"
            )
    return {"dtype": "float64", "steps": 4, "rows": rows}


def _difference(rank: int, case: Case, name: str) -> float:
    size = {"dim": 32, "layers": 2, "heads": 4, "seq_len": 24}
    text, batch, worst = work.Text(24), 8, 0.0
    # Not AdamW, to which the scale of a gradient is the same; and a norm that is clipped at every
    # step.
    sgd, clip = partial(torch.optim.SGD, lr=1.0), 0.1
    single = plain_single.Trainer(work.build(**size, dtype=torch.float64), sgd, clip)
    sharded = side(name, case, work.build(**size, dtype=torch.float64), batch, sgd, clip, "fp64")
    for step in range(4):
        whole = work.batch_of(text, batch, step)
        expected = single.step(whole).item()
        worst = max(worst, abs(sharded.step(case.local(whole, rank)).item() / expected - 1))
    return worst


# ---- steps: how long one optimizer step takes ----------------------------------------------------


def steps(pairs: int, cases: Sequence[Case] = TIMED) -> dict[str, Any]:
    """Alternating steps of both sides in the same processes; the ratio weft / plain of every
    pair."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        for rivals in (
            ("plain", "weft"),
            ("plain", "plain"),
        ):  # the second says what the measurement itself adds
            ranks = on_ranks(_alternate, case, rivals, pairs)
            # The step is done when the slower rank is.
            first, second = (
                [max(times) for times in zip(*(rank[i] for rank in ranks))] for i in (0, 1)
            )
            rows.append(
                {
                    "case": case.name,
                    "layout": case.layout,
                    "rivals": rivals,
                    "limit": case.limit,
                    "ratio": quartiles(b / a for a, b in zip(first, second)),
                    "step_s": [statistics.median(first), statistics.median(second)],
                    "first_s": first,
                    "second_s": second,
                }
            )
            print(
                f"{case.name}: {rivals[1]} / {rivals[0]} = {spread(rows[-1]['ratio'])}", flush=True
            )
    return {
        "model": STEP_SIZE,
        "batch": STEP_BATCH,
        "clip": CLIP,
        "pairs": pairs,
        "warmup": WARMUP,
        "rows": rows,
    }


def _alternate(
    rank: int, case: Case, rivals: tuple[str, str], pairs: int
) -> tuple[list[float], list[float]]:
    text = work.Text(STEP_SIZE["seq_len"])
    sides = [side(name, case, case.build(), STEP_BATCH) for name in rivals]
    times: tuple[list[float], list[float]] = ([], [])
    for step in range(WARMUP + pairs):
        batch = case.local(work.batch_of(text, STEP_BATCH, step), rank)
        losses = {}
        for i in (0, 1) if step % 2 == 0 else (1, 0):
            dist.barrier()
            start = time.perf_counter()
            loss = sides[i].step(batch)
            times[i].append(time.perf_counter() - start)
            losses[i] = loss.item()
        if step < WARMUP:  # later, rounding has room to grow
            assert abs(losses[1] / losses[0] - 1) < 1e-4, (
                f"step {step}: the losses are {losses[0]} and {losses[1]}"
            )
    return times[0][WARMUP:], times[1][WARMUP:]


def beside(rows: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """These rows, with those of the file for other cases, in the order of the cases. Each says with
    which command it was measured, if with another one than the file's."""
    before = json.loads(path.read_text())
    measured = {row["case"] for row in rows}
    kept = [
        {"command": before["command"]} | row
        for row in before["rows"]
        if row["case"] not in measured
    ]
    order = [case.name for case in TIMED]
    return sorted([*kept, *rows], key=lambda row: order.index(row["case"]))


def quartiles(values: Iterable[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"low": low, "median": median, "high": high}


# ---- calls: what Python does in a step ----------------------------------------------------------


def calls() -> dict[str, Any]:
    """Calls of Python functions in a steady step of both sides, of the rank with the most of weft's
    over plain's; and which functions weft calls more often."""
    rows = []
    for case in (*SINGLE, *CASES, *LLAMA):
        world = 1 if case in SINGLE else WORLD
        plain, weft = max(
            on_ranks(_calls, case, world=world), key=lambda rank: rank[1].total() / rank[0].total()
        )
        rows.append(
            {
                "case": case.name,
                "layout": case.layout,
                "plain": plain.total(),
                "weft": weft.total(),
                "more": more(weft, plain),
                "less": more(plain, weft),
            }
        )
        print(f"{case.name}: {weft.total()} / {plain.total()}", flush=True)
    return {"model": STEP_SIZE, "batch": STEP_BATCH, "limit": CALLS_LIMIT, "rows": rows}


def _calls(rank: int, case: Case) -> list[Counter[str]]:
    text = work.Text(STEP_SIZE["seq_len"])
    batch = case.local(work.batch_of(text, STEP_BATCH, 0), rank)
    found = []
    for name in ("plain", "weft"):
        trainer = side(name, case, case.build(), STEP_BATCH)
        for _ in range(WARMUP):
            trainer.step(batch)
        found.append(calls_of(trainer, batch))
    return found


# ---- memory: what one rank holds at its peak -----------------------------------------------------


def memory() -> dict[str, Any]:
    """Peak resident memory of every rank, each side in processes of its own, above what importing
    it takes."""
    rows = []
    model = work.build(**MEMORY_SIZE)
    theory = {case.layout: case.state_bytes(model) for case in CASES}
    del model
    for case in CASES:
        for name in ("plain", "weft"):
            ranks = on_ranks(_peak, case, name)
            rows.append(
                {
                    "case": case.name,
                    "layout": case.layout,
                    "side": name,
                    "state_bytes": theory[case.layout],
                    "peak_bytes": [peak for peak, _ in ranks],
                    "imports_bytes": [imports for _, imports in ranks],
                }
            )
    return {"model": MEMORY_SIZE, "batch": MEMORY_BATCH, "steps": 4, "rows": rows}


def _peak(rank: int, case: Case, name: str) -> tuple[int, int]:
    tiny = {"dim": 16, "layers": 1, "heads": 2, "seq_len": 8}
    side(name, case, work.build(**tiny), MEMORY_BATCH).step(
        case.local(work.batch_of(work.Text(8), MEMORY_BATCH, 0), rank)
    )
    imports = peak_rss()
    trainer = side(name, case, work.build(**MEMORY_SIZE), MEMORY_BATCH)
    text = work.Text(MEMORY_SIZE["seq_len"])
    for step in range(4):
        trainer.step(case.local(work.batch_of(text, MEMORY_BATCH, step), rank))
    return peak_rss() - imports, imports


def peak_rss() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# ---- start-up: from command to first optimizer step ----------------------------------------------


def startup(pairs: int) -> dict[str, Any]:
    """`weft train` and a bare torchrun script in turn, each until its first step's loss stands in a
    file."""
    times: dict[str, list[float]] = {"plain": [], "weft": []}
    for pair in range(pairs + 1):
        for name in ("plain", "weft") if pair % 2 == 0 else ("weft", "plain"):
            with tempfile.TemporaryDirectory() as folder:
                took = (_start_bare if name == "plain" else _start_weft)(Path(folder))
            if pair:  # the first pair only fills the caches
                times[name].append(took)
    ratio = quartiles(w / p for w, p in zip(times["weft"], times["plain"]))
    median = [statistics.median(times["plain"]), statistics.median(times["weft"])]
    return {
        "model": START_SIZE,
        "batch": START_BATCH,
        "pairs": pairs,
        "limit": START_LIMIT,
        "ratio": ratio,
        "start_s": median,
        "plain_s": times["plain"],
        "weft_s": times["weft"],
    }


def _start_bare(folder: Path) -> float:
    out = folder / "step.jsonl"
    size = [f"{key}={value}" for key, value in {"batch": START_BATCH, **START_SIZE}.items()]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
    return _until_line([*launcher, str(HERE / "bare.py"), str(out), *size], out, folder)


def _start_weft(folder: Path) -> float:
    config = folder / "run.toml"
    config.write_text(f"""
output = "{folder / "out"}"
[model]
build = "weft.models:decoder"
{chr(10).join(f"{key} = {value}" for key, value in START_SIZE.items())}
[data]
build = "work:Text"
seq_len = {START_SIZE["seq_len"]}
[layout]
axes = "dp{WORLD}"
[train]
batch = {START_BATCH}
steps = 1
clip = {CLIP}
threads = 1
log_every = 1
[optimizer]
name = "adamw"
lr = {work.LR}
""")
    return _until_line(
        ["-m", "weft", "train", str(config)], folder / "out" / "metrics.jsonl", folder
    )


def _until_line(arguments: list[str], out: Path, folder: Path) -> float:
    """Seconds from starting Python with these arguments until the file has a line. Raises if it
    ends without one."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path[1:]]),
    }
    with (folder / "log").open("w+") as log:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        while not (out.exists() and out.read_bytes().endswith(b"\n")):
            if process.poll() is not None:
                raise RuntimeError(
                    f"{arguments} wrote no first step:\n{(folder / 'log').read_text()}"
                )
            time.sleep(0.005)
        took = time.perf_counter() - start
        process.wait(timeout=120)  # what comes after the first step is not measured
    return took


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


def table(results: dict[str, dict[str, Any]]) -> str:
    """The tables of README.md, in Markdown."""
    lines: list[str] = []
    if found := results.get("steps"):
        lines += [
            "| step | plain, s | weft, s | weft / plain, median (quartiles) | at most | plain /"
            " plain |"
        ]
        lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
        control = {row["case"]: row for row in found["rows"] if row["rivals"][1] == "plain"}
        for row in (row for row in found["rows"] if row["rivals"][1] == "weft"):
            plain_s, weft_s = row["step_s"]
            lines.append(
                f"| {row['case']} (`{row['layout']}`) | {plain_s:.3f} | {weft_s:.3f} |"
                f" {spread(row['ratio'])} | {row['limit']} |"
                f" {spread(control[row['case']]['ratio'])} |"
            )
    if found := results.get("calls"):
        lines += ["", "| Python calls of a step | plain | weft | weft / plain | at most |"]
        lines += ["| --- | ---: | ---: | ---: | ---: |"]
        lines += [
            f"| {row['case']} (`{row['layout']}`) | {row['plain']} | {row['weft']} |"
            f" {row['weft'] / row['plain']:.3f} | {found['limit']} |"
            for row in found["rows"]
        ]
    if found := results.get("startup"):
        plain_s, weft_s = found["start_s"]
        lines += [
            "",
            (
                "| start-up | torchrun, s | weft train, s | weft / torchrun, median (quartiles) |"
                " at most |"
            ),
        ]
        lines += ["| --- | ---: | ---: | ---: | ---: |"]
        lines += [
            f"| to the first step | {plain_s:.2f} | {weft_s:.2f} | {spread(found['ratio'])} |"
            f" {found['limit']} |"
        ]
    if found := results.get("memory"):
        lines += [
            "",
            "| memory per rank, MB | weights, gradients, moments | plain, peak | weft, peak |",
        ]
        lines += ["| --- | ---: | ---: | ---: |"]
        peak = {(row["layout"], row["side"]): max(row["peak_bytes"]) for row in found["rows"]}
        for layout, row in {row["layout"]: row for row in found["rows"]}.items():
            sides = " | ".join(f"{peak[layout, name] / 1e6:.0f}" for name in ("plain", "weft"))
            lines.append(
                f"| {row['case']} (`{layout}`) | {row['state_bytes'] / 1e6:.0f} | {sides} |"
            )
    if found := results.get("check"):
        lines += ["", "| relative difference of the loss from one device, float64 | plain | weft |"]
        lines += ["| --- | ---: | ---: |"]
        error = {(row["layout"], row["side"]): row["loss_rel_err"] for row in found["rows"]}
        for layout, row in {row["layout"]: row for row in found["rows"]}.items():
            sides = " | ".join(f"{error[layout, name]:.0e}" for name in ("plain", "weft"))
            lines.append(f"| {row['case']} (`{layout}`) | {sides} |")
    return "\n".join(lines).strip()


def spread(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.3f} ({ratio['low']:.3f} - {ratio['high']:.3f})"


def write_readme() -> None:
    """Put the tables of all results between README.md's two markers."""
    results = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    begin, end = "<!-- results: written by run.py -->", "<!-- end of results -->"
    before, rest = README.read_text().split(begin)
    _, after = rest.split(end)
    README.write_text(f"{before}{begin}\n\n{table(results)}\n\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts: dict[str, Callable[..., dict[str, Any]]] = {
        "check": check,
        "calls": calls,
        "memory": memory,
        "startup": startup,
        "steps": steps,
    }
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(parts)}; all if none is named"
    )
    parser.add_argument("--pairs", type=int, default=60, help="pairs of steps that are measured")
    parser.add_argument("--starts", type=int, default=5, help="pairs of starts that are measured")
    parser.add_argument("--cases", nargs="+", default=[], help="layouts of `steps`; others stay")
    options = parser.parse_args()
    cases = [case for case in TIMED if case.layout in options.cases or not options.cases]
    if unknown := set(options.parts) - set(parts):
        parser.error(f"no part {', '.join(sorted(unknown))}: choose from {', '.join(parts)}")
    parts["steps"] = partial(steps, options.pairs, cases)
    parts["startup"] = partial(startup, options.starts)
    RESULTS.mkdir(exist_ok=True)
    for name in options.parts or parts:
        result = {
            "environment": environment(),
            "command": f"python benchmarks/overhead/run.py {' '.join(sys.argv[1:])}".strip(),
        }
        result |= parts[name]()
        if name == "steps" and options.cases:
            result["rows"] = beside(result["rows"], RESULTS / "steps.json")
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        write_readme()
    print(table({path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}))


if __name__ == "__main__":
    main()
