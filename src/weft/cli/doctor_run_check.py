"""What `weft doctor` asks of a run file: whether it is sound, and how large its checkpoints are."""

from __future__ import annotations

from weft.core import RunConfig
from weft.engine import own_device
from weft.launch import CheckpointSize, Finding
from weft.planner import run_precision
from weft.train import build_skeleton, check_device, check_run


def check_run_file(run: RunConfig) -> Finding:
    """Check what `weft train` checks before any process starts. Raises Refusal."""
    check_device(run, check_run(run), own_device())
    axes, world = str(run.layout.axes), run.world
    found = f"a driver and {', '.join(run.workers)}" if run.workers else f"{axes}, {world} ranks"
    return Finding("run file", "ok", found, "", {"layout": axes, "world": world})


def checkpoint_size(run: RunConfig) -> CheckpointSize:
    """How large one checkpoint of the run is: its weights and what the optimizer keeps of them."""
    parameters = sum(parameter.numel() for parameter in build_skeleton(run).parameters())
    itemsize = 8 if run.precision.compute == "fp64" else 4
    kept = run_precision(run).state_bytes
    return CheckpointSize(parameters, round(parameters * (itemsize + kept)))
