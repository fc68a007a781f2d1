"""A run of 300 steps through 44 faults drawn at random, beside the same run left alone.

    python benchmarks/faults/run.py                     some 30 minutes on 2 cores
    python benchmarks/faults/run.py dp2 --seed 3
    python benchmarks/faults/run.py hosts              some 4 minutes

Takes root: for a disk that can be filled, a network that can be cut, and for hosts as network
namespaces.

Each part is a layout's run, or that of several hosts. It writes results/PART.json, then the tables
in README.md are written anew. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
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
import network  # noqa: E402
import parts  # noqa: E402
import torch  # noqa: E402
from stored import tensors  # noqa: E402

from weft import checkpoint  # noqa: E402

LOCAL = """
[sync]
name = "local_sgd"
period = 4
timeout_s = 5
"""
# part -> the layout, and what its run file has more
LAYOUTS = {
    "dp2": ("dp2", ""),
    "fsdp2": ("fsdp2", ""),
    "pp2": ("pp2", ""),
    "tp2": ("tp2", ""),
    "local": ("dp2", LOCAL),
}
STEPS, FAULTS, EVERY, DISK_MB = 300, 44, 4, 16
WAIT_S = 60.0  # for a step after the fault
LINK_S = (
    10.0  # for the run to end its ranks while the link is down; others wait for it to come back
)
LOSS = 0.1  # relative, between last losses of replicas that step by themselves
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

    def __init__(self, folder: Path, part: str):
        folder.mkdir(exist_ok=True)
        shutil.copy(HERE / "slow.py", folder)
        self._layout, more = LAYOUTS[part]
        (folder / "run.toml").write_text(RUN + more)
        self.out, self._file = folder / "out", folder / "run.toml"
        self.start(False)

    def start(self, resume: bool) -> None:
        command = [*network.INSIDE, sys.executable, "-m", "weft", "train", str(self._file)]
        command += ["--layout", self._layout]
        command += ["--output", str(self.out), *(["--resume"] if resume else [])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
        }
        self.log = open(self.out.parent / "log", "ab")  # noqa: SIM115
        self._told = self.log.tell()
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

    def error(self) -> str | None:
        """The one error that it has ended with by itself; None: there is none that is clear."""
        said = (self.out.parent / "log").read_bytes()[self._told :].decode(errors="replace")
        said = said.replace(f"{self.out.parent}/", "")
        told = [line for line in said.splitlines() if line.startswith("weft: ")]
        return told[-1] if told and "Traceback (most recent call last)" not in said else None

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
    run.process.wait(4 * WAIT_S)  # replicas that step by themselves try again
    (run.out / "filler").unlink()
    run.again()


def stalled(run: Run, dice: random.Random) -> None:
    rank = dice.choice(run.ranks())
    os.kill(rank, signal.SIGSTOP)
    time.sleep(1.0)
    os.kill(rank, signal.SIGCONT)


def connection_cut(run: Run, dice: random.Random) -> None:
    network.cut_connection(dice.choice(run.ranks()), dice)


def link_down_for_a_second(run: Run, dice: random.Random) -> None:
    with network.link_down():
        time.sleep(1.0)


def link_down_until_noticed(run: Run, dice: random.Random) -> None:
    ranks = set(run.ranks())
    with network.link_down():
        until = time.perf_counter() + LINK_S
        while ranks <= set(run.ranks()) and time.perf_counter() < until:
            time.sleep(0.02)


# what fails -> the kinds of it, one of which is drawn
KINDS = {
    "kill": (killed, killed, killed_all, told_to_stop),
    "stop": (stopped, stalled),
    "disk": (flipped, cut_short, lost, full_disk),
    "network": (connection_cut, link_down_for_a_second, link_down_until_noticed),
}


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


def through(part: str, seed: int) -> dict[str, Any]:
    dice, done = random.Random(f"{part} {seed}"), []
    with (
        tempfile.TemporaryDirectory() as folder,
        small_disk(Path(folder) / "faults" / "out"),
        network.namespace(),
    ):
        alone, began = Run(Path(folder) / "alone", part), time.perf_counter()
        assert alone.process.wait() == 0, (Path(folder) / "alone" / "log").read_text()
        alone_s = time.perf_counter() - began
        run, began = Run(Path(folder) / "faults", part), time.perf_counter()
        moments = sorted(dice.sample(range(2 * EVERY + 2, STEPS - 4), FAULTS))
        kinds = [what for what in KINDS for _ in range(FAULTS // len(KINDS))]
        dice.shuffle(kinds)
        while moments and not run.process.poll():
            if run.step() < moments[0]:
                if run.process.poll() == 0:
                    break
                time.sleep(0.01)
                continue
            time.sleep(dice.random() * 0.1)
            kind, at, since = dice.choice(KINDS[kinds[-1]]), run.step(), time.perf_counter()
            try:
                kind(run, dice)
            except (IndexError, OSError):
                continue  # it is between two lives, or just moved a file: drawn anew
            at = max(at, run.step())  # steps that it took until it stopped
            moments.pop(0)
            fault = {"what": kinds.pop(), "kind": kind.__name__, "step": at, "error": None}
            done.append(fault)
            # one step may have been under way; a step beyond it is one of the run that goes on
            while run.step() <= at + 1 and time.perf_counter() - since < WAIT_S:
                code = run.process.poll()
                if code == 0:
                    break
                if code:
                    fault["error"] = run.error()
                    if fault["error"] is None:
                        break
                    run.again()
                time.sleep(0.01)
            fault["lost_s"] = time.perf_counter() - since
            print(f"{part}: {fault}", flush=True)
        code = run.process.wait()
        faults_s = time.perf_counter() - began
        log = (Path(folder) / "faults" / "log").read_text(errors="replace")
        same = code == 0 and _same(alone.out, run.out)
        lines = [_metrics(each.out) for each in (alone, run)]
        if code or not (same or part == "local"):
            print(log[-3000:])
        last = [float(each[-1]["loss"]) for each in lines]
        steps = [line["step"] for line in lines[1]]
        if steps != list(range(1, STEPS + 1)):
            print("steps:", steps)
            print(log)
        return {
            "faults": done,
            "code": code,
            "same": same,
            "complete": steps == list(range(1, STEPS + 1)),
            "loss": abs(last[1] / last[0] - 1),
            "alone_s": alone_s,
            "faults_s": faults_s,
            "set_aside": log.count("set aside"),
        }


def _metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


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
        "| run | faults | ended with an error | same at the end | all steps once | left alone, s |"
    ]
    lines += ["| --- | ---: | ---: | --- | --- | ---: |"]
    for part, result in results.items():
        one = result["runs"]
        faults = one["faults"]
        well = one["code"] == 0 and len(faults) == FAULTS
        well &= one["same"] or (part == "local" and one["loss"] < LOSS)
        held &= well and one["complete"]
        how = "bit for bit" if one["same"] else f"loss {one['loss']:.0%} apart"
        marks = [how if well else "FAIL", "holds" if one["complete"] else "FAIL"]
        errors = sum(fault["error"] is not None for fault in faults)
        lines.append(
            f"| {part} | {len(faults)} | {errors} | {marks[0]} | {marks[1]} |"
            f" {one['alone_s']:.0f} |"
        )
    every = [fault for result in results.values() for fault in result["runs"]["faults"]]
    lines += ["", "| what fails | how | faults | lost, s: median | most |"]
    lines += ["| --- | --- | ---: | ---: | ---: |"]
    for what, kinds in KINDS.items():
        for kind in dict.fromkeys(each.__name__ for each in kinds):
            lost = sorted(fault["lost_s"] for fault in every if fault["kind"] == kind)
            if lost:
                lines.append(
                    f"| {what} | {kind.replace('_', ' ')} | {len(lost)} |"
                    f" {statistics.median(lost):.1f} | {lost[-1]:.1f} |"
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
    measured = {part: lambda part=part: through(part, options.seed) for part in LAYOUTS}
    measured["hosts"] = hosts.measure
    parser = parts.parser(__doc__, measured)
    parser.add_argument("--seed", type=int, default=0, help="of the faults and their moments")
    options = parser.parse_args()
    return parts.measure(HERE, options.parts, measured, tables)


if __name__ == "__main__":
    sys.exit(main())
