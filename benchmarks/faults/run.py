"""A run of 200 steps through 20 faults drawn at random, beside the same run left alone.

    python benchmarks/faults/run.py                     some 6 minutes on 2 cores
    python benchmarks/faults/run.py dp2 --seed 3
    python benchmarks/faults/run.py hosts              some 4 minutes

Takes root: for a disk that can be filled, and for hosts as network namespaces.

Each part is a layout's run, or that of several hosts. It writes results/PART.json, then the tables
in README.md are written anew. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import hosts  # noqa: E402
import parts  # noqa: E402
import torch  # noqa: E402
from stored import tensors  # noqa: E402

from weft import checkpoint  # noqa: E402

LAYOUTS = {"dp2": "dp2", "fsdp2": "fsdp2", "pp2": "pp2"}
STEPS, FAULTS, EVERY, DISK_MB = 200, 20, 4, 16
BOUND = 1e-9  # between runs of hosts, whose layouts change; in float64
RUN = f"""
[model]
build = "weft.models:decoder"
dim = 32
layers = 2
heads = 4
hidden = 64
seq_len = 16
dropout = 0.1
[data]
build = "slow:Slow"
[train]
batch = 8
accumulate = 2
steps = {STEPS}
clip = 1.0
warmup = 20
decay = "cosine"
log_every = 1
hang_s = 3
[optimizer]
lr = 1e-2
[checkpoint]
every = {EVERY}
keep = 4
restarts = 99
"""


class Run:
    """One `weft train` after another in one folder, until all steps are taken."""

    def __init__(self, folder: Path, layout: str):
        folder.mkdir(exist_ok=True)
        shutil.copy(HERE / "slow.py", folder)
        (folder / "run.toml").write_text(RUN)
        self.out, self._file, self._layout, self.said = (
            folder / "out",
            folder / "run.toml",
            layout,
            "",
        )
        self.start(False)

    def start(self, resume: bool) -> None:
        command = [sys.executable, "-m", "weft", "train", str(self._file), "--layout", self._layout]
        command += ["--output", str(self.out), *(["--resume"] if resume else [])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
        }
        self.log = open(self.out.parent / "log", "ab")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, env=environment, stdout=self.log, stderr=subprocess.STDOUT
        )

    def step(self) -> int:
        lines = (
            (self.out / "metrics.jsonl").read_text().splitlines()
            if (self.out / "metrics.jsonl").exists()
            else []
        )
        try:
            return int(json.loads(lines[-1])["step"]) if lines else 0
        except ValueError:  # it is being written
            return int(json.loads(lines[-2])["step"])

    def ranks(self) -> list[int]:
        try:
            path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            return list(map(int, path.read_text().split()))
        except OSError:
            return []

    def files(self) -> list[Path]:
        """Of the latest checkpoint, if there is one before it."""
        steps = checkpoint.saved_steps(self.out / "checkpoints")
        return (
            sorted((self.out / "checkpoints" / f"step-{steps[-1]:06d}").iterdir())
            if len(steps) > 1
            else []
        )

    def full(self) -> None:
        """No byte is left where it writes."""
        with open(self.out / "filler", "wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 14))

    def again(self) -> None:
        """Started by hand, as after a machine's own failure."""
        self.process.wait()
        self.start(checkpoint.latest_step(self.out / "checkpoints") is not None)


def killed(run: Run, dice: random.Random) -> None:
    os.kill(dice.choice(run.ranks()), signal.SIGKILL)


def stopped(run: Run, dice: random.Random) -> None:
    os.kill(dice.choice(run.ranks()), signal.SIGSTOP)


def told_to_stop(run: Run, dice: random.Random) -> None:
    run.process.terminate()
    run.again()


def killed_all(run: Run, dice: random.Random) -> None:
    for process in (run.process.pid, *run.ranks()):
        os.kill(process, signal.SIGKILL)
    run.again()


def flipped(run: Run, dice: random.Random) -> None:
    path = dice.choice(run.files())
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)
    killed(run, dice)


def cut_short(run: Run, dice: random.Random) -> None:
    path = dice.choice(run.files())
    with open(path, "r+b") as file:
        file.truncate(dice.randrange(path.stat().st_size))
    killed(run, dice)


def lost(run: Run, dice: random.Random) -> None:
    dice.choice([path for path in run.files() if path.suffix == ".safetensors"]).unlink()
    killed(run, dice)


def full_disk(run: Run, dice: random.Random) -> None:
    run.full()
    run.process.wait(60)
    (run.out / "filler").unlink()
    run.again()


KINDS = (
    killed,
    killed,
    killed,
    stopped,
    told_to_stop,
    killed_all,
    flipped,
    cut_short,
    lost,
    full_disk,
)


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A disk of its own that can be filled. Takes root."""
    folder.mkdir(parents=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)], check=True
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def through(layout: str, seed: int) -> dict[str, Any]:
    dice, done = random.Random(f"{layout} {seed}"), []
    with tempfile.TemporaryDirectory() as folder, small_disk(Path(folder) / "faults" / "out"):
        alone, began = Run(Path(folder) / "alone", layout), time.perf_counter()
        assert alone.process.wait() == 0, (Path(folder) / "alone" / "log").read_text()
        alone_s = time.perf_counter() - began
        run, began = Run(Path(folder) / "faults", layout), time.perf_counter()
        moments = sorted(dice.sample(range(2 * EVERY + 2, STEPS - 4), FAULTS))
        while moments and run.process.poll() is None:
            if run.step() < moments[0]:
                time.sleep(0.01)
                continue
            time.sleep(dice.random() * 0.1)
            kind, at = dice.choice(KINDS), run.step()
            try:
                kind(run, dice)
            except (
                IndexError,
                OSError,
            ):  # it is between two lives, or just moved a file: drawn anew
                continue
            done.append({"kind": kind.__name__, "step": at})
            moments.pop(0)
            print(f"{layout}: {done[-1]}", flush=True)
            since = time.perf_counter()
            while (
                run.process.poll() is None and run.step() <= at and time.perf_counter() - since < 60
            ):
                time.sleep(0.02)
        code = run.process.wait()
        faults_s = time.perf_counter() - began
        log = (Path(folder) / "faults" / "log").read_text(errors="replace")
        same = code == 0 and _same(alone.out, run.out)
        steps = [
            json.loads(line)["step"]
            for line in (run.out / "metrics.jsonl").read_text().splitlines()
        ]
        if not same:
            print(log[-3000:])
        return {
            "faults": done,
            "code": code,
            "same": same,
            "complete": steps == list(range(1, STEPS + 1)),
            "alone_s": alone_s,
            "faults_s": faults_s,
            "set_aside": log.count("set aside"),
        }


def _same(one: Path, other: Path) -> bool:
    """Whether two runs end with the same weights and optimizer state, bit for bit."""
    first, second = tensors(one), tensors(other)
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def tables(results: parts.Results) -> tuple[list[str], bool]:
    held, lines = True, []
    several, results = (
        results.get("hosts"),
        {name: each for name, each in results.items() if name != "hosts"},
    )
    lines += [
        "| layout | faults | weights and optimizer bit for bit | all steps once | left alone, s | s"
        " a fault |"
    ]
    lines += ["| --- | --- | --- | --- | ---: | ---: |"]
    for layout, result in results.items():
        one = result["runs"]
        kinds = [fault["kind"].replace("_", " ") for fault in one["faults"]]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        well = one["same"] and len(kinds) == FAULTS
        held &= well and one["complete"]
        each = (one["faults_s"] - one["alone_s"]) / max(1, len(kinds))
        marks = ["holds" if mark else "FAIL" for mark in (well, one["complete"])]
        lines.append(
            f"| {layout} | {counts} | {marks[0]} | {marks[1]} | {one['alone_s']:.0f} | {each:.1f} |"
        )
    if several is not None:
        more, well = _table_of_hosts(several["runs"])
        lines, held = [*lines, "", *more], held and well
    return [*lines, ""], held


def _table_of_hosts(one: dict[str, Any]) -> tuple[list[str], bool]:
    ended = all(code == 0 for code in one["codes"])
    held = (
        ended
        and one["complete"]
        and len(one["lost"]) == len(hosts.WAYS)
        and max(one["loss"], one["weights"]) < BOUND
    )
    lines = [
        "| 4 hosts, 2 ranks each | at step | goes on with three from step | after, s |",
        "| --- | ---: | ---: | ---: |",
    ]
    for fault in one["lost"]:
        lines.append(
            f"| {fault['way']} | {fault['at']} | {fault['from']} | {fault['without_s']:.1f} |"
        )
    mark = "holds" if held else "FAIL"
    lines += [
        "",
        (
            f"Losses {one['loss']:.1e} apart at most, weights and optimizer state"
            f" {one['weights']:.1e}, after all steps"
        ),
    ]
    lines[-1] += (
        f", each once: {mark}. {one['alone_s']:.0f} s left alone, {one['lost_s']:.0f} s so."
    )
    return lines, held


def main() -> int:
    measured = {
        name: lambda layout=layout: through(layout, options.seed)
        for name, layout in LAYOUTS.items()
    }
    measured["hosts"] = hosts.measure
    parser = parts.parser(__doc__, measured)
    parser.add_argument("--seed", type=int, default=0, help="of the faults and their moments")
    options = parser.parse_args()
    return parts.measure(HERE, options.parts, measured, tables)


if __name__ == "__main__":
    sys.exit(main())
