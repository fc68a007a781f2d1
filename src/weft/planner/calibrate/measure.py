"""`weft calibrate`: measures part by part, in one process per GPU or core, and writes the
hardware sheet."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from weft.core import ConfigError, dump_toml
from weft.launch import Backend, Pool, memory_finding, usable_cores

from ..cost import hardware
from ..cost.hardware import Hardware
from . import collective_skew, collectives, compute, decoder_blocks, fixed_overhead
from .cpu_contention import CpuLoadSample
from .sheet import Machine, Measurements, sheet

LIMIT_S = 300.0  # for any one part, which takes some seconds
TRIES, AGAIN_S = 2, 40.0  # at each, as long as all have not taken so many seconds
QUIET = 0.05  # of the processors' time: what others may have had, for a part not to be tried again

Say = Callable[[str], None]


def sheet_path(out: Path | None) -> Path:
    """Where the sheet goes. Raises ConfigError if none can be written there."""
    path = hardware.local_sheet() if out is None else out
    if path.suffix != ".toml":
        raise ConfigError(
            "--out",
            str(path),
            "is not a name of a hardware file",
            f"write {path.stem or 'sheet'}.toml",
        )
    if path.is_dir():
        raise ConfigError("--out", str(path), "is a folder", "name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(
            "--out", str(path), f"cannot be written ({error.strerror})", "name another file"
        ) from None
    return path


def this_machine() -> tuple[Machine, Backend]:
    """This machine as a run would use it."""
    gpus = torch.cuda.device_count()
    if gpus:
        kind = torch.cuda.get_device_properties(0)
        return Machine(gpus, 1, "cuda", kind.name, kind.total_memory), "nccl"
    ranks = usable_cores()
    facts = memory_finding().facts
    memory = min(size for size in (facts["machine_bytes"], facts["limit_bytes"]) if size)
    return Machine(ranks, 1, "cpu", f"{processor()}, {ranks} cores", memory / ranks), "gloo"


Part = tuple[str, Callable[..., Any], tuple[Any, ...]]
FIRST: tuple[Part, ...] = (  # what a process has held at most never shrinks
    ("a step and a process", fixed_overhead.measure_overhead, ()),
    ("dtypes", compute.dtypes, ()),
)


def more_measurements(dtypes: Iterable[str], ranks: int) -> list[Part]:
    """What is measured of so many processes that know these dtypes, in turn."""
    alone: list[Part] = [
        *((f"matrices, {dtype}", compute.matmuls, (dtype,)) for dtype in dtypes),
        ("attention", compute.attention, ()),
        ("memory", compute.streams, ()),
        ("small operations", compute.launches, ()),
        ("a decoder", decoder_blocks.time_decoders, ()),
        ("optimizer", compute.update, ()),
    ]
    together: list[Part] = [
        *((kind, collectives.time_collective, (kind,)) for kind in collectives.KINDS),
        ("a sum beside compute", collectives.time_overlap, ()),
        ("layouts", collective_skew.steps, ()),
    ]
    return alone + (together if ranks > 1 else [])


def measure(machine: Machine, backend: Backend, say: Say) -> Measurements:
    """Every part in turn. Raises WorkerDied."""
    with Pool(machine.ranks, threads=None, backend=backend) as pool:
        found: dict[str, Any] = {}
        disturbed: list[float] = []
        began = time.monotonic()

        def take(name: str, function: Callable[..., Any], args: Sequence[Any], parts: int) -> None:
            """As it was when other programs did least."""
            tries: list[tuple[float, int, Any]] = []
            while not tries or (
                len(tries) < TRIES and min(tries)[0] > QUIET and time.monotonic() - began < AGAIN_S
            ):
                say(f"{name}{', again' if tries else ''} ({len(found) + 1} of {parts})")
                since, before = CpuLoadSample.now(), time.process_time()
                told = pool.run(_time_cpu, function, *args, timeout=LIMIT_S)
                own_s = sum(own for _, own in told) + time.process_time() - before
                tries.append((since.others(own_s), len(tries), told[0][0]))
            least, _, found[name] = min(tries)
            disturbed.append(least)

        for part in FIRST:
            take(*part, len(FIRST) + len(more_measurements(compute.DTYPES, machine.ranks)))
        left = more_measurements(found["dtypes"], machine.ranks)
        for part in left:
            take(*part, len(FIRST) + len(left))
    return Measurements(
        machine,
        {dtype: found[f"matrices, {dtype}"] for dtype in found["dtypes"]},
        found["attention"],
        found["memory"],
        found["small operations"],
        found["a decoder"],
        found["optimizer"],
        [moved for kind in collectives.KINDS for moved in found.get(kind, [])],
        found.get("a sum beside compute"),
        found["a step and a process"],
        found.get("layouts", []),
        max(disturbed),
    )


def _time_cpu(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """What it gives, and the processor's time that this process and its threads had for it."""
    before = time.process_time()
    found = function(*args)
    return found, time.process_time() - before


def calibrate(out: Path | None, say: Say) -> tuple[Path, Measurements, Hardware]:
    """Measure, and write the sheet: whole, or not at all. Raises Refusal, WorkerDied."""
    path = sheet_path(out)
    seen = measure(*this_machine(), say)
    made = sheet(seen)
    put_sheet(path, dump_toml(made))
    return path, seen, made


def put_sheet(path: Path, text: str) -> None:
    """Raises ConfigError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise ConfigError(
            "--out", str(path), f"cannot be written ({error.strerror})", "name another file"
        ) from None


def processor() -> str:
    """The name of this machine's."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
