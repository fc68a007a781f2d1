"""What this machine is: versions, cores, memory, open files."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from .. import rank_process
from . import cgroups
from .findings import Finding

SHARED_BYTES = (
    1 << 30
)  # of /dev/shm, below which NCCL between GPUs of a host has been seen to lack room; containers
# have 64 MiB if nobody asks for more
# open files of a process: a rank has a connection to every other one, for each of its groups
FILES = 4096
FAST = {
    "bf16": {"avx512_bf16", "amx_bf16", "bf16"},
    "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}  # x86 and Arm


def version_finding(weft: str) -> Finding:
    """Python, torch, weft as it says of itself, and what belongs to them."""
    import torch

    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "weft": weft,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None,
        "transformers": _installed_version("transformers"),
    }
    found = ", ".join(f"{name} {version}" for name, version in facts.items() if version)
    lacking = [name for name in ("cuda", "transformers") if not facts[name]]
    found += f"; without {', '.join(lacking)}" if lacking else ""
    advice = "" if facts["transformers"] else "[model] hf needs it: pip install 'weft[hf]'"
    return Finding("versions", "ok", found, advice, facts)


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def core_finding() -> Finding:
    """Those that this process may use, and the threads that it will."""
    omp, flags = os.environ.get("OMP_NUM_THREADS"), _flags()
    facts = {
        "machine": os.cpu_count() or 1,
        "allowed": rank_process.usable_cores(),
        "quota": cgroups.cores(),
        "omp": omp,
    }
    return judge_cores({**facts, "fast": [dtype for dtype, names in FAST.items() if flags & names]})


def judge_cores(facts: dict[str, Any]) -> Finding:
    """Of the `machine`'s cores, the number `allowed` to this process, the `quota` of their time,
    OMP_NUM_THREADS."""
    machine, allowed, quota, omp = (facts[key] for key in ("machine", "allowed", "quota", "omp"))
    usable = max(1, int(allowed if quota is None else min(allowed, quota)))
    facts = {**facts, "usable": usable}
    found = f"{usable} of {machine}" if usable < machine else f"{machine}"
    if quota is not None and quota < allowed:
        found += f" (this control group has the time of {quota:g})"
    found += f", OMP_NUM_THREADS={omp}" if omp else ""
    if omp and not (omp.isdigit() and int(omp)):
        advice = (
            f"OMP_NUM_THREADS={omp} is not a number of threads: unset it, or give each process"
            " cores // processes"
        )
        return Finding("cores", "note", found, advice, facts)
    if omp and int(omp) > usable:
        return Finding(
            "cores",
            "note",
            found,
            f"there are more threads than cores: set OMP_NUM_THREADS={usable}",
            facts,
        )
    if usable < allowed and not omp:
        advice = (
            f"weft assumes {allowed} cores: set OMP_NUM_THREADS or train.threads to {usable} //"
            " processes of this host"
        )
        return Finding("cores", "note", found, advice, facts)
    return Finding(
        "cores", "ok", found, "" if omp else "each process gets cores // processes threads", facts
    )


def memory_finding() -> Finding:
    """What is free, and what this process may have."""
    page = os.sysconf("SC_PAGE_SIZE")
    facts = {
        "machine_bytes": os.sysconf("SC_PHYS_PAGES") * page,
        "free_bytes": (
            _available()
            or (os.sysconf("SC_AVPHYS_PAGES") * page if sys.platform == "linux" else None)
        ),
        "limit_bytes": cgroups.memory_bytes(),
    }
    machine, free, limit = facts.values()
    found = f"{decimal(machine or 0)}" + (f", {decimal(free)} free" if free is not None else "")
    if limit is not None and limit < (machine or 0):
        advice = "a process that takes more is killed (SIGKILL, exit code 137)"
        return Finding(
            "memory",
            "note",
            f"{found}; this control group may have {decimal(limit)}",
            advice,
            facts,
        )
    if free is not None and machine and free < machine / 10:
        return Finding(
            "memory", "note", found, "other programs have most of it: runs may be killed", facts
        )
    return Finding("memory", "ok", found, "", facts)


def shared_memory_finding() -> Finding:
    """/dev/shm, over which NCCL connects the GPUs of a host, and data loaders their workers."""
    if not Path("/dev/shm").is_dir():
        return Finding(
            "shared memory",
            "ok",
            "there is no /dev/shm here",
            "nothing that runs on the CPU needs it",
        )
    return judge_shared(shutil.disk_usage("/dev/shm").total, shutil.disk_usage("/dev/shm").free)


def judge_shared(total: int, free: int) -> Finding:
    """Bytes of /dev/shm, and those of them that are free."""
    facts, found = (
        {"total_bytes": total, "free_bytes": free},
        f"/dev/shm has {decimal(total)}, {decimal(free)} free",
    )
    if free < SHARED_BYTES:
        advice = (
            "gloo works without it; NCCL between GPUs and data loaders with workers fail: docker"
            " run --shm-size=1g"
        )
        return Finding("shared memory", "note", found, advice, facts)
    return Finding("shared memory", "ok", found, "", facts)


def open_files_finding() -> Finding:
    """How many files and connections a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "any number" if soft == resource.RLIM_INFINITY else str(soft)
    facts = {"limit": None if soft == resource.RLIM_INFINITY else soft}
    if soft != resource.RLIM_INFINITY and soft < FILES:
        more = FILES if hard == resource.RLIM_INFINITY else min(16 * FILES, hard)
        advice = (
            f"each rank opens a connection to each other rank in each group: set ulimit -n {more}"
            " for hundreds of ranks"
        )
        return Finding(
            "open files", "note" if soft >= FILES // 4 else "wrong", shown, advice, facts
        )
    return Finding("open files", "ok", shown, "", facts)


def _available() -> int | None:
    """Bytes that Linux could free without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None
    )


def _flags() -> set[str]:
    """What the processor says that it can."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {
        flag
        for line in lines
        if line.startswith(("flags", "Features"))
        for flag in line.split(":", 1)[1].split()
    }
