"""Four hosts of two ranks each, one of which is lost in each of three ways and comes back, beside
the run left alone.

Hosts are network namespaces (benchmarks/testbed.py). Host 0 keeps the store where they meet, and
stays.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import testbed  # noqa: E402
from stored import tensors  # noqa: E402

from weft import checkpoint  # noqa: E402

HOSTS, LEAST, LAYOUT, STEPS, EVERY = 4, 3, "dp4.tp2", 400, 5
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
wait_s = 0.04
[train]
batch = 12
steps = {STEPS}
clip = 1.0
warmup = 20
decay = "cosine"
log_every = 1
hang_s = 30
[optimizer]
lr = 1e-3
[precision]
compute = "fp64"
[checkpoint]
every = {EVERY}
keep = 4
restarts = 99
"""
LAID = "layout dp3.tp2, in place of dp4.tp2"
WAYS = ("power off", "cut off", "told to stop")


class Hosts:
    """`weft train` on each of the hosts."""

    def __init__(self, folder: Path):
        folder.mkdir()
        shutil.copy(HERE / "slow.py", folder)
        (folder / "run.toml").write_text(RUN)
        self.folder, self.out, self.log = folder, folder / "out", folder / "log"
        self.log.touch()
        self.processes: dict[int, subprocess.Popen] = {}

    def start(self, host: int) -> None:
        command = [
            sys.executable,
            "-m",
            "weft",
            "train",
            str(self.folder / "run.toml"),
            "--output",
            str(self.out),
        ]
        command += [
            "--layout",
            LAYOUT,
            "--nodes",
            f"{LEAST}:{HOSTS}",
            "--rdzv",
            f"{testbed.NET}1:29400",
        ]
        path = os.pathsep.join(filter(None, sys.path))
        self.processes[host] = testbed.start(
            host, command, self.log, PYTHONPATH=path, OMP_NUM_THREADS="1"
        )

    def lines(self) -> list[dict[str, Any]]:
        file = self.out / "metrics.jsonl"
        try:
            return [json.loads(line) for line in file.read_text().splitlines()]
        except (OSError, ValueError):  # not yet there, or being written
            return []

    def step(self) -> int:
        return max((line["step"] for line in self.lines()), default=0)

    def until(self, true: Callable[[], bool], what: str, patience_s: float = 120) -> float:
        """Seconds until this is true."""
        began = time.monotonic()
        while not true():
            if time.monotonic() - began > patience_s:
                raise RuntimeError(
                    f"{what}: not within {patience_s:.0f} s\n{self.log.read_text()[-6000:]}"
                )
            time.sleep(0.02)
        return time.monotonic() - began

    def said(self, text: str) -> int:
        return self.log.read_text(errors="replace").count(text)


def lose(hosts: Hosts, way: str, host: int) -> dict[str, Any]:
    """Lose a host, go on without it, and take it back."""
    three, four = hosts.said("3 of 4 hosts are here"), hosts.said("4 of 4 hosts are here")
    laid = hosts.said(LAID)
    at = hosts.step()
    if way == "power off":
        testbed.power_off(host)
    elif way == "cut off":
        testbed.cut_off(host, True)
    else:
        hosts.processes[host].terminate()
    hosts.until(lambda: hosts.said("3 of 4 hosts are here") > three, f"{way}: no three hosts")
    from_step = checkpoint.latest_step(hosts.out / "checkpoints") or 0
    without_s = hosts.until(lambda: hosts.said(LAID) > laid, f"{way}: no layout of three")
    hosts.until(lambda: hosts.step() >= max(at, from_step) + 10, f"{way}: no steps of three")
    if way == "cut off":
        hosts.until(
            lambda: hosts.processes[host].poll() is not None,
            "the host that is cut off does not end",
        )
        testbed.cut_off(host, False)
    code = hosts.processes[host].wait(60)
    resumed = hosts.said("resumed ")
    hosts.start(host)
    hosts.until(lambda: hosts.said("4 of 4 hosts are here") > four, f"{way}: it is not taken back")
    hosts.until(lambda: hosts.said("resumed ") > resumed, f"{way}: it does not go on with four")
    back = hosts.step()
    hosts.until(lambda: hosts.step() >= back + 10, f"{way}: no steps of four")
    return {"way": way, "at": at, "from": min(at, from_step), "code": code, "without_s": without_s}


def measure() -> dict[str, Any]:
    """Both runs, and what they end with."""
    lacking = testbed.lacking()
    if lacking:
        raise RuntimeError(lacking)
    with tempfile.TemporaryDirectory() as folder, testbed.hosts(HOSTS):
        alone = Hosts(Path(folder) / "alone")
        alone_s = _whole(alone)
        run, began, lost = Hosts(Path(folder) / "lost"), time.monotonic(), []
        for host in range(HOSTS):
            run.start(host)
        run.until(lambda: run.step() >= 12, "no steps")
        for number, way in enumerate(WAYS):
            lost.append(lose(run, way, HOSTS - 1 - number))
            print(lost[-1], flush=True)
        codes = [run.processes[host].wait(300) for host in range(HOSTS)]
        lost_s = time.monotonic() - began
        steps = [line["step"] for line in run.lines()]
        return {
            "lost": lost,
            "codes": codes,
            "alone_s": alone_s,
            "lost_s": lost_s,
            "complete": steps == list(range(1, STEPS + 1)),
            "loss": max(
                abs(a["loss"] - b["loss"]) for a, b in zip(alone.lines(), run.lines(), strict=True)
            ),
            "weights": _apart(alone.out, run.out),
        }


def _whole(hosts: Hosts) -> float:
    began = time.monotonic()
    for host in range(HOSTS):
        hosts.start(host)
    codes = [hosts.processes[host].wait(300) for host in range(HOSTS)]
    if any(codes):
        raise RuntimeError(f"{codes}\n{hosts.log.read_text()[-6000:]}")
    return time.monotonic() - began


def _apart(one: Path, other: Path) -> float:
    """The largest difference of two runs' last weights and optimizer state."""
    first, second = tensors(one), tensors(other)
    return max(float((first[name] - second[name]).abs().max()) for name in {*first, *second})


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
