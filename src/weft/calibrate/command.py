"""`weft calibrate`: measure part by part, in as many processes as there are GPUs or else cores, and write the sheet."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from .. import tables
from ..cost import hardware
from ..cost.hardware import Hardware
from ..doctor import machine as doctor
from ..errors import ConfigError
from ..launch.processes import Backend, Pool, cores
from . import amid, blocks, compute, links, steps
from .others import Moment
from .sheet import Machine, Measured, sheet

ALONE = 7  # parts of one process, beside the matrices of each dtype
LIMIT_S = 300.0  # for any one part, which takes some seconds
TRIES, AGAIN_S = 2, 40.0  # at each, as long as all have not taken so many seconds
QUIET = 0.05  # of the processors' time: what others may have had, for a part not to be tried again

Say = Callable[[str], None]


def target(out: Path | None) -> Path:
    """Where the sheet goes. Raises ConfigError if none can be written there."""
    path = hardware.local_sheet() if out is None else out
    if path.suffix != ".toml":
        raise ConfigError("--out", str(path), "is no name of a sheet", f"write {path.stem or 'sheet'}.toml")
    if path.is_dir():
        raise ConfigError("--out", str(path), "is a folder", "name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError("--out", str(path), f"cannot be written ({error.strerror})", "name another file") from None
    return path


def here() -> tuple[Machine, Backend]:
    """This machine as a run would use it."""
    gpus = torch.cuda.device_count()
    if gpus:
        kind = torch.cuda.get_device_properties(0)
        return Machine(gpus, 1, "cuda", kind.name, kind.total_memory), "nccl"
    ranks = cores()
    facts = doctor.memory().facts
    memory = min(size for size in (facts["machine_bytes"], facts["limit_bytes"]) if size)
    return Machine(ranks, 1, "cpu", f"{_processor()}, {ranks} cores", memory / ranks), "gloo"


def measure(machine: Machine, backend: Backend, say: Say) -> Measured:
    """Every part in turn. Raises WorkerDied."""
    with Pool(machine.ranks, threads=None, backend=backend) as pool:
        disturbed: list[float] = []
        began = time.monotonic()
        several = machine.ranks > 1
        parts = ALONE + len(compute.DTYPES) + (2 + len(links.KINDS) if several else 0)

        def part(name: str, function: Callable[..., Any], *args: Any) -> Any:
            """As it was when other programs did least."""
            tries: list[tuple[float, int, Any]] = []
            while not tries or (len(tries) < TRIES and min(tries)[0] > QUIET and time.monotonic() - began < AGAIN_S):
                say(f"{name}{', again' if tries else ''} ({len(disturbed) + 1} of {parts})")
                since, before = Moment.now(), time.process_time()
                told = pool.run(_timed, function, *args, timeout=LIMIT_S)
                own_s = sum(own for _, own in told) + time.process_time() - before
                tries.append((since.others(own_s), len(tries), told[0][0]))
            others, _, found = min(tries)
            disturbed.append(others)
            return found

        floor = part("a step and a process", steps.floor)  # first: what a process has held at most never shrinks
        dtypes = part("dtypes", compute.dtypes)
        parts -= len(compute.DTYPES) - len(dtypes)
        return Measured(
            machine,
            {dtype: part(f"matrices, {dtype}", compute.matmuls, dtype) for dtype in dtypes},
            part("attention", compute.attention),
            part("memory", compute.streams),
            part("small operations", compute.launches),
            part("a decoder", blocks.decoders),
            part("optimizer", compute.update),
            [moved for kind in links.KINDS if several for moved in part(kind, links.collective, kind)],
            part("a sum beside compute", links.beside) if several else None,
            floor,
            part("layouts", amid.steps) if several else [],
            max(disturbed),
        )


def _timed(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """What it gives, and the processor's time that this process and its threads had for it."""
    before = time.process_time()
    found = function(*args)
    return found, time.process_time() - before


def calibrate(out: Path | None, say: Say) -> tuple[Path, Measured, Hardware]:
    """Measure, and write the sheet: whole, or not at all. Raises Refusal, WorkerDied."""
    path = target(out)
    seen = measure(*here(), say)
    made = sheet(seen)
    put(path, tables.dump(made))
    return path, seen, made


def put(path: Path, text: str) -> None:
    """Raises ConfigError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise ConfigError("--out", str(path), f"cannot be written ({error.strerror})", "name another file") from None


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
