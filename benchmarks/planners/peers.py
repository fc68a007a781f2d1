"""Peers: their repositories, and what one says of runs, in its own process and environment."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runs import Run

HERE = Path(__file__).resolve().parent
PEERS = {
    "calculon": "Calculon",
    "llm-analysis": "llm-analysis",
    "simumax": "SimuMax",
}  # part -> name
FOLDERS = {"simumax": "SimuMax", "calculon-search": "calculon"}  # where it is not the part's name
NO_LIMIT_S = 1e9


def checkout_of(part: str, folder: Path) -> Path:
    """Where the repository that a part needs is."""
    return folder / FOLDERS.get(part, part)


def commit_of(checkout: Path) -> str:
    command = ["git", "-C", checkout, "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def asked(part: str, folder: Path, runs: Sequence[Run], limit_s: float) -> dict[str, Any]:
    """What this peer says of each run, or why it cannot; its commit; the core's seconds that it
    took."""
    checkout = checkout_of(part, folder)
    with tempfile.TemporaryDirectory() as scratch:
        given, out = Path(scratch, "runs.json"), Path(scratch, "out.json")
        given.write_text(json.dumps([asdict(run) for run in runs]))
        command = [checkout / ".venv/bin/python", HERE / f"drive_{part.replace('-', '_')}.py"]
        subprocess.run(
            [*command, checkout, given, out, str(limit_s)], check=True, stderr=subprocess.DEVNULL
        )
        found: dict[str, Any] = json.loads(out.read_text())
    return found | {"commit": commit_of(checkout)}
