"""Optimizer steps: torch's loop, its foreach step and its fused step, on plain tensors and on the
DTensors of FSDP2.

    python benchmarks/optimizers/run.py  # half a minute on one core

Writes results/steps.json and prints the table of README.md.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

HERE = Path(__file__).resolve().parent
ROUNDS = 15
BLOCK = [(256, 256)] * 4 + [(1024, 256), (256, 1024)] + [(256,)] * 2
KINDS = (
    (torch.optim.AdamW, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adagrad, {}),
)
SIDES = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def parameters(mesh: DeviceMesh | None) -> list[nn.Parameter]:
    """Twelve blocks' weights with gradients, float32; on a mesh, as rows of dim 0."""
    torch.manual_seed(0)
    found = []
    for shape in BLOCK * 12:
        weight, grad = torch.randn(shape), torch.randn(shape)
        if mesh is not None:
            weight, grad = (distribute_tensor(t, mesh, [Shard(0)]) for t in (weight, grad))
        found.append(nn.Parameter(weight))
        found[-1].grad = grad
    return found


def measure(kind: type, arguments: dict, mesh: DeviceMesh | None) -> dict[str, list[float]]:
    """Seconds of a step of each side, which take turns."""
    made = {}
    for side, how in SIDES.items():
        made[side] = kind(parameters(mesh), lr=1e-3, **arguments, **how)
        try:
            made[side].step()
        except NotImplementedError:  # DTensor has no rule for that fused step
            del made[side]
    seconds: dict[str, list[float]] = {side: [] for side in made}
    for _ in range(ROUNDS):
        for side, optimizer in made.items():
            began = time.perf_counter()
            optimizer.step()
            seconds[side].append(time.perf_counter() - began)
    return seconds


def main() -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1,))
    found = {}
    print("| optimizer | tensors | foreach / loop | fused / loop |\n| --- | --- | ---: | ---: |")
    for kind, arguments in KINDS:
        for name, there in (("plain", None), ("DTensor", mesh)):
            seconds = measure(kind, arguments, there)
            found[f"{kind.__name__}, {name}"] = seconds
            ratios = [
                f"{median(a / b for a, b in zip(seconds[side], seconds['loop'], strict=True)):.2f}"
                if side in seconds
                else "none"
                for side in ("foreach", "fused")
            ]
            print(f"| {kind.__name__} | {name} | {ratios[0]} | {ratios[1]} |")
    dist.destroy_process_group()
    facts = {
        "command": "python benchmarks/optimizers/run.py",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    (HERE / "results").mkdir(exist_ok=True)
    text = json.dumps({"environment": facts, "seconds": found}, indent=1)
    (HERE / "results" / "steps.json").write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
