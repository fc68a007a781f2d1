"""Checkpoints: written under each layout and read under every other; the pause of a save; files
beside other ways.

    python benchmarks/checkpoints/run.py                     all of it: some 10 minutes on 2 cores
    python benchmarks/checkpoints/run.py matrix

Each part writes results/PART.json, then the tables in README.md are written anew. Exit code 1 if a
target is missed.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import parts  # noqa: E402
import torch  # noqa: E402
import worker  # noqa: E402
from torch import Tensor  # noqa: E402

from weft import checkpoint  # noqa: E402
from weft.core import run_config  # noqa: E402
from weft.core.layout import Layout  # noqa: E402
from weft.core.shards import whole_shard  # noqa: E402
from weft.launch.local_workers import Pool, run_workers  # noqa: E402
from weft.train.trainer import train  # noqa: E402

LAYOUTS = (
    "dp1",
    "dp4",
    "fsdp4",
    "fsdp2+zero1",
    "dp2.fsdp2",
    "tp2",
    "tp2+sequence.dp2",
    "pp2",
    "pp2+zb-v.dp2",
    "cp2",
    "ep2",
    "fsdp2+ep.tp2",
)
BOUND, SIZES, PAUSE = 1e-9, (2**28, 2**30), 1.2
RUN = """
[model]
build = "weft.models:decoder"
dim = 32
layers = 4
heads = 4
kv_heads = 2
hidden = 32
seq_len = 16
experts = 4
balance = 0.0
bias = 0.01
gate = "sigmoid"
[data]
build = "weft.data:stdlib"
seq_len = 16
[train]
batch = 8
accumulate = 2
steps = {steps}
clip = 1.0
warmup = 2
log_every = 1
[optimizer]
lr = 1e-2
[precision]
compute = "fp64"
[checkpoint]
every = 3
"""


def matrix() -> dict[str, Any]:
    """The largest relative error of the losses and the last tensors of steps 4 to 6, of every
    writer and reader."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder, Pool(4) as pool:
        base = Path(folder)
        whole_run = _run(base / "whole", "dp1", 6)
        pool.run(train, whole_run, False, world=1)
        losses, last = _losses(whole_run), _tensors(whole_run)
        for writer in LAYOUTS:
            first = _run(base / "first", writer, 3)
            pool.run(train, first, False, world=Layout.parse(writer).world)
            found[writer] = {}
            for reader in LAYOUTS:
                shutil.copytree(first.output, base / "rest")
                rest = _run(base, reader, 6, "rest")
                pool.run(train, rest, True, world=Layout.parse(reader).world)
                errors = [abs(a - b) / b for a, b in zip(_losses(rest), losses, strict=True)]
                tensors = _tensors(rest)
                # a moment of a gradient that is nearly 0 is measured against all of its kind
                errors += [_error(tensors[name], want, last) for name, want in last.items()]
                found[writer][reader] = (
                    max(errors) if tensors.keys() == last.keys() else float("inf")
                )
                shutil.rmtree(base / "rest")
            shutil.rmtree(base / "first")
            print(writer, max(found[writer].values()), flush=True)
    return found


def _run(folder: Path, axes: str, steps: int, out: str = "") -> run_config.RunConfig:
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text(RUN.format(steps=steps))
    overrides = {"output": json.dumps(str(folder / out)), "layout.axes": json.dumps(axes)}
    run = run_config.load_run(folder / "run.toml", overrides)
    (folder / "run.toml").unlink()
    return run


def _losses(run: run_config.RunConfig) -> list[float]:
    lines = (Path(run.output) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def _tensors(run: run_config.RunConfig) -> dict[str, Tensor]:
    folder = Path(run.output) / "checkpoints"
    contents = checkpoint.read_index(folder)
    found = {name: torch.empty(s.shape, dtype=s.dtype) for name, s in contents.tensors.items()}
    checkpoint.load_checkpoint(
        folder, None, [whole_shard(name, tensor) for name, tensor in found.items()]
    )
    return found


def _error(got: Tensor, want: Tensor, every: dict[str, Tensor]) -> float:
    size = float(want.double().norm()) or 1.0
    floor = 1e-6 * max(float(t.double().norm()) for t in every.values() if t.shape == want.shape)
    return float((got.double() - want.double()).norm()) / max(size, floor)


def pause() -> dict[str, Any]:
    return {str(size): run_workers(worker.pause, 1, size)[0] for size in SIZES}


def files() -> dict[str, Any]:
    return {str(size): run_workers(worker.files, 1, size)[0] for size in SIZES}


def tables(results: dict[str, dict[str, Any]]) -> tuple[list[str], bool]:
    held, lines = True, []
    if rows := results.get("matrix", {}).get("runs"):
        lines += [
            (
                "### Written under one layout, read under another: largest relative error, asked"
                f" below {BOUND:g}"
            ),
            "",
        ]
        lines += ["| written under | " + " | ".join(rows) + " |", "| --- |" + " ---: |" * len(rows)]
        for writer, each in rows.items():
            lines.append(
                f"| {writer} | " + " | ".join(f"{error:.0e}" for error in each.values()) + " |"
            )
        worst = max(max(each.values()) for each in rows.values())
        held &= worst < BOUND
        lines += [
            "",
            (
                f"{len(rows) ** 2} pairs, the worst {worst:.1e}:"
                f" {'holds' if worst < BOUND else 'FAIL'}"
            ),
            "",
        ]
    if rows := results.get("pause", {}).get("runs"):
        lines += ["### For how long training stops", ""]
        lines += ["| bytes | pause, s | a plain copy, s | pause / copy | the first time, s |"]
        lines += ["| ---: | ---: | ---: | --- | ---: |"]
        for nbytes, one in rows.items():
            ratio = one["pause"] / one["copy"]
            held &= ratio <= PAUSE
            verdict = "holds" if ratio <= PAUSE else "FAIL"
            cells = (
                f"{one['pause']:.3f} | {one['copy']:.3f} | {ratio:.2f} {verdict} |"
                f" {one['first']:.3f}"
            )
            lines.append(f"| {int(nbytes):,} | {cells} |")
        lines.append("")
    if rows := results.get("files", {}).get("runs"):
        lines += [
            "### Files, GB a second",
            "",
            "| bytes | | weft | torch.save | DCP |",
            "| ---: | --- | ---: | ---: | ---: |",
        ]
        for nbytes, one in rows.items():
            for what in ("save", "load"):
                speeds = [
                    int(nbytes) / one[f"{how} {what}"] / 1e9 for how in ("weft", "torch", "dcp")
                ]
                lines.append(
                    f"| {int(nbytes):,} | {what} | "
                    + " | ".join(f"{speed:.2f}" for speed in speeds)
                    + " |"
                )
        lines.append("")
    return lines, held


def main() -> int:
    measured = {"matrix": matrix, "pause": pause, "files": files}
    return parts.measure(HERE, parts.parser(__doc__, measured).parse_args().parts, measured, tables)


if __name__ == "__main__":
    sys.exit(main())
