"""weft beside plain torch, Accelerate, Lightning Fabric and Trainer, transformers' Trainer and
DeepSpeed: one model, one text, 2 processes of one thread.

    pip install -e ".[hf]" -r benchmarks/frameworks/requirements.txt
    python benchmarks/frameworks/run.py [--rounds N] [--only SIDE ...]

Writes results/frameworks.json, and the table in README.md from it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import torch
import torch.nn.functional as F
from packaging.requirements import Requirement
from torch import Tensor

HERE = Path(__file__).resolve().parent
RESULT, README = HERE / "results" / "frameworks.json", HERE / "README.md"
WARMUP = 5  # steps, not measured
ABORT = "terminate called without an active exception"  # of std::terminate, in gloo
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(common.RANKS)]


@dataclass(frozen=True)
class Side:
    """A framework. `command` starts its run, `packages` are what its user installs."""

    name: str
    command: list[str]
    packages: list[str]
    script: str
    env: dict[str, str] = field(default_factory=dict)


def torchrun(name: str, script: str, *packages: str, **env: str) -> Side:
    return Side(name, [*TORCHRUN, str(HERE / script)], ["torch", *packages], script, env)


def python(name: str, script: str, *packages: str) -> Side:
    return Side(name, [sys.executable, str(HERE / script)], ["torch", *packages], script)


SIDES = [
    torchrun("plain torch (DDP)", "side_plain.py"),
    Side(
        "weft (dp2)", [sys.executable, "-m", "weft", "train"], ["torch", "weft"], "side_weft.toml"
    ),
    torchrun("Accelerate", "side_accelerate.py", "accelerate"),
    python("Lightning Fabric", "side_fabric.py", "lightning"),
    python("Lightning Trainer", "side_lightning.py", "lightning"),
    torchrun("transformers Trainer", "side_trainer.py", "transformers", "accelerate"),
    torchrun("DeepSpeed ZeRO 1", "side_deepspeed.py", "deepspeed", ZERO="1"),
    torchrun("DeepSpeed ZeRO 3", "side_deepspeed.py", "deepspeed", ZERO="3"),
]


# ---- one run -------------------------------------------------------------------------------------


def run_side(side: Side, steps: int, check: bool) -> dict[str, Any]:
    """A run of a side, in a process of its own: what it logged, seconds to its first step, peak
    resident memory of its largest process; with `check`, its weights after the step."""
    with tempfile.TemporaryDirectory() as folder:
        connection, sender = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("spawn").Process(
            target=_run, args=(side, steps, check, Path(folder), sender)
        )
        process.start()
        sender.close()
        try:
            found: dict[str, Any] = connection.recv()
        except EOFError:
            raise RuntimeError(f"{side.name} did not run") from None
        process.join()
    return found


def _run(side: Side, steps: int, check: bool, folder: Path, sender: Any) -> None:
    saved = folder / "weights.pt"
    env = {
        **os.environ,
        **side.env,
        "STEPS": str(steps),
        "LOG": str(folder / "log.jsonl"),
        "SAVE": str(saved),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(HERE),
        "PYTHONDONTWRITEBYTECODE": "",  # pip has compiled the others, and not an editable weft
    }
    if check:
        env["CHECK"] = "1"
    command = side.command + (weft_options(folder, steps, check) if "weft" in side.packages else [])
    begin = time.time()
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    log_file = folder / "log.jsonl"
    log = (
        [json.loads(line) for line in log_file.read_text().splitlines()]
        if log_file.exists()
        else []
    )
    # gloo sometimes aborts a process that leaves its process group: the steps have been taken
    aborted = ABORT in done.stderr and len(log) == steps and check == saved.exists()
    if done.returncode and not aborted:
        raise RuntimeError(f"{side.name}: {done.stderr[-3000:]}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    times = [line["time"] for line in log]
    weights: dict[str, Tensor] = torch.load(saved) if check else {}
    sender.send(
        {
            "first_step_s": times[0] - begin,
            "step_s": [b - a for a, b in itertools.pairwise(times)][WARMUP - 1 :],
            "peak_bytes": peak,
            "aborted": bool(done.returncode),
            "losses": [line["loss"] for line in log],
            "weights": {name: w.numpy() for name, w in weights.items()},  # tensors go by files
        }
    )
    sender.close()


def weft_options(folder: Path, steps: int, check: bool) -> list[str]:
    options = {"train.steps": steps, "output": folder / "run", "folder": HERE}
    if check:
        options |= {"optimizer.name": "sgd", "optimizer.lr": 1.0, "optimizer.weight_decay": 0.0}
    sets = [
        f"--set={key}={json.dumps(str(v)) if isinstance(v, Path) else v}"
        for key, v in options.items()
    ]
    return [str(HERE / "side_weft.toml"), *sets]


# ---- what is compared ----------------------------------------------------------------------------


def one_device() -> tuple[float, dict[str, Tensor]]:
    """(mean loss over all tokens of the first batch, the weights after a step of SGD at rate 1), in
    float64 on one device."""
    model = common.build_model(torch.float64)
    rows = common.stack([common.Text()[i] for i in range(common.BATCH)])
    logits = model(rows["input_ids"], attention_mask=rows["attention_mask"]).logits
    targets = rows["labels"][:, 1:].flatten()
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=-100)
    loss.backward()
    weights = {
        name: (p - p.grad).detach() for name, p in model.named_parameters() if p.grad is not None
    }
    return loss.item(), weights


def errors(found: dict[str, Any], loss: float, weights: dict[str, Tensor]) -> tuple[float, float]:
    """How far the first loss is from one device's, relative; and the first update, as the largest
    difference of a weight over the largest update."""
    start = {n: p.detach() for n, p in common.build_model(torch.float64).named_parameters()}
    largest = max((weights[n] - start[n]).abs().max().item() for n in weights)
    off = max(
        (torch.from_numpy(found["weights"][n]).double() - weights[n]).abs().max().item()
        for n in weights
    )
    return abs(found["losses"][0] / loss - 1), off / largest


def packages(side: Side) -> int:
    """Packages that a user of this side installs beyond those of torch and numpy."""
    return len(closure(side.packages) - closure(["torch", "numpy"]))


def closure(names: list[str]) -> set[str]:
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop().lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        for text in importlib.metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    return found


def lines_written(script: str) -> int:
    """Lines that the user writes: those between the marks `user` and `end`, or all of a run file,
    without empty ones."""
    lines = [line.strip() for line in (HERE / script).read_text().splitlines()]
    if script.endswith(".py"):
        lines = lines[lines.index("# user") + 1 : lines.index("# end")]
    return len([line for line in lines if line and not line.startswith("#")])


def compare(sides: list[Side], rounds: int, steps: int) -> list[dict[str, Any]]:
    loss, weights = one_device()
    rows: list[dict[str, Any]] = []
    for side in sides:
        loss_error, update_error = errors(run_side(side, 1, check=True), loss, weights)
        print(f"{side.name}: loss {loss_error:.0e}, update {update_error:.0e}", flush=True)
        rows.append(
            {
                "side": side.name,
                "packages": packages(side),
                "lines": lines_written(side.script),
                "loss_error": loss_error,
                "update_error": update_error,
                "step_s": [],
                "first_step_s": [],
                "peak_bytes": [],
                "aborted": [],
            }
        )
    for turn in range(rounds):
        order = list(zip(sides, rows))
        for side, row in order if turn % 2 == 0 else reversed(order):
            found = run_side(side, steps, check=False)
            row["step_s"].append(statistics.median(found["step_s"]))
            row["first_step_s"].append(found["first_step_s"])
            row["peak_bytes"].append(found["peak_bytes"])
            row["aborted"].append(found["aborted"])
            print(f"{turn} {side.name}: {row['step_s'][-1]:.3f} s a step", flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    plain = rows[0]
    lines = [
        "| | step / plain torch's (lowest, highest round) | first step, s | peak MB | packages |"
        " lines | first loss off by | first update off by | aborted |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        ratios = [a / b for a, b in zip(row["step_s"], plain["step_s"])]
        lines.append(
            f"| {row['side']} | {statistics.median(ratios):.3f} ({min(ratios):.3f}, "
            f"{max(ratios):.3f}) | {statistics.median(row['first_step_s']):.1f} |"
            f" {statistics.median(row['peak_bytes']) / 1e6:.0f} | {row['packages']} |"
            f" {row['lines']} | {row['loss_error']:.0e} | {row['update_error']:.0e} |"
            f" {sum(row['aborted'])} |"
        )
    return "\n".join(lines)


def write_readme(rows: list[dict[str, Any]]) -> None:
    begin, end = "<!-- results: written by run.py -->", "<!-- end of results -->"
    before, rest = README.read_text().split(begin)
    README.write_text(f"{before}{begin}\n\n{table(rows)}\n\n{end}{rest.split(end)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side that are timed")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of a run")
    parser.add_argument("--only", nargs="+", default=[], help="words of names of sides")
    options = parser.parse_args()
    named = [s for s in SIDES if any(word in s.name for word in options.only)] or SIDES
    rows = compare(named, options.rounds, options.steps)
    print(table(rows))
    if named != SIDES:
        return
    versions = {
        name: importlib.metadata.version(name)
        for name in ("torch", "accelerate", "lightning", "transformers", "deepspeed")
    }
    RESULT.parent.mkdir(exist_ok=True)
    about = {"versions": versions, "python": platform.python_version(), "cores": os.cpu_count()}
    RESULT.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    write_readme(rows)


if __name__ == "__main__":
    main()
