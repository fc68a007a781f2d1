"""Whether a launcher started this process, and which rank it gave it. No torch."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

# set by an agent of weft for the ranks it starts: "elastic" where their number may change
AGENT = "WEFT_AGENT"


def launched_rank() -> tuple[int, int, int] | None:
    """(rank, world, local rank) if torchrun or srun started this process, else None."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0))
    # A batch script has SLURM_PROCID too, though nobody started its peers: only srun sets the step.
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env and "SLURM_NTASKS" in env:
        return int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"]), int(env.get("SLURM_LOCALID", 0))
    return None


def note_error(text: str) -> None:
    """Tell the torchelastic agent that started this process, if one did, that weft itself ended it,
    and why."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        Path(file).write_text(
            json.dumps({"message": text, "timestamp": int(time.time()), "weft": True}),
            encoding="utf-8",
        )


def restart_count() -> int:
    """How often torchrun has started the processes anew, after one died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def local_world_size() -> int:
    """Number of ranks on this host, by what the launcher says; all of them if it says nothing."""
    found = launched_rank()
    return _said_local_world_size() or (found[1] if found else 1)


def _said_local_world_size() -> int | None:
    said = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_TASKS_PER_NODE", "")
    match = re.match(r"\d+", said)  # SLURM writes 4(x2),3
    return int(match.group()) if match else None


def on_one_host() -> bool:
    """Whether the launcher says that all ranks are on this host."""
    found = launched_rank()
    return found is not None and _said_local_world_size() == found[1]


def master_address() -> tuple[str, int]:
    """(host, port) where the ranks meet: MASTER_ADDR and MASTER_PORT, or derived from the SLURM
    job."""
    host = os.environ.get("MASTER_ADDR") or first_host(
        os.environ.get("SLURM_JOB_NODELIST", "127.0.0.1")
    )
    # The same port on all hosts, and another for each job.
    port = os.environ.get("MASTER_PORT") or 20000 + int(os.environ.get("SLURM_JOB_ID", 0)) % 20000
    return host, int(port)


def first_host(nodelist: str) -> str:
    """The first host of a SLURM list: gpu003 of `gpu[003-005,9],login`."""
    match = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodelist)
    return "".join(part or "" for part in match.groups()) if match else nodelist
