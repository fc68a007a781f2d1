"""What each rank holds and sends, written to ranks.json in the run folder: after the first step,
and at the end of the run.

    {"layout": "dp2", "step": 180, "parts": {"blocks.0": 308800, ...},
     "holdings": [{"blocks.0": 308800, ...}],
     "ranks": [{"rank": 0, "host": "node1", "holding": 0, "weights_bytes": 5079040, ...}],
     "collectives": [{"kind": "all_reduce", "axis": "dp", "count": 2, "bytes": 5079088,
                      "sent_bytes": 5079088}]}

`parts`: elements of each part of the model; `holdings`: those that a rank holds, and `holding` says
which of them a rank has. `collectives` are those of rank 0 in its first step.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from weft.core import RANKS, gather_json, is_inside, replace_file
from weft.engine import Engine, TrainingEngine, local_tensor

from .metrics import peak_memory_bytes


class RankRecord:
    """Of one run. `before_bytes`: the memory of this process before the model was built; `writes`:
    whether this rank writes the file."""

    def __init__(self, engine: TrainingEngine, folder: Path, before_bytes: int, writes: bool):
        self._engine, self._path, self._writes = engine, folder / RANKS, writes
        # on a GPU only what the allocator gave is counted
        self._before = before_bytes if engine.mesh.device.type == "cpu" else 0

    def write(self, collectives: Iterable[Mapping[str, Any]], stage_wait_s: float) -> None:
        """All ranks call it together, between two steps.

        Args:
            collectives: of this rank's first step.
            stage_wait_s: seconds of a step in which this rank waits for other stages.
        """
        engine = self._engine
        if not isinstance(engine, Engine):  # modules live on named workers, not on ranks
            return
        mine = self._own(engine) | {"stage_wait_s": stage_wait_s}
        every, holdings = gather_json(mine), list[dict[str, int]]()
        if not self._writes:
            return
        for rank in every:
            holding = rank.pop("holds")
            if holding not in holdings:
                holdings.append(holding)
            rank["holding"] = holdings.index(holding)
        found = {
            "layout": str(engine.global_plan.layout),
            "step": engine.steps_done,
            "parts": model_parts(engine),
            "holdings": holdings,
            "ranks": every,
            "collectives": [dict(one) for one in collectives],
        }
        replace_file(self._path, json.dumps(found) + "\n")

    def _own(self, engine: Engine) -> dict[str, Any]:
        seen = set[int]()
        weights = [*engine.params.values(), *engine.low.filled.values()]
        gradients = [p.grad for p in weights if p.grad is not None]
        gradients += [bucket.flat for bucket in engine.reducer.buckets]
        state = [
            value
            for of_param in engine.optimizer.state.values()
            for value in of_param.values()
            if isinstance(value, Tensor)
        ]
        held = dict.fromkeys(model_parts(engine), 0)
        for name, p in engine.params.items():
            held[part_of(name, engine.global_plan.blocks)] += local_tensor(p.detach()).numel()
        return {
            "rank": engine.mesh.place,
            "host": socket.gethostname(),
            "device": str(engine.mesh.device),
            "stages": list(engine.plan.stages(engine.mesh.rank)) if engine.plan.staging else [],
            "parameters": sum(held.values()),
            "weights_bytes": held_bytes(weights, seen),
            "gradients_bytes": held_bytes(gradients, seen),
            "state_bytes": held_bytes(state, seen),
            "before_bytes": self._before,
            "peak_bytes": peak_memory_bytes(engine.mesh.device),
            "holds": {part: count for part, count in held.items() if count},
        }


def model_parts(engine: Engine) -> dict[str, int]:
    """Elements of each part of the whole model: its blocks, and what is outside of them by the
    module."""
    found: dict[str, int] = {}
    for weight in engine.global_plan.weights:
        part = part_of(weight.name, engine.global_plan.blocks)
        found[part] = found.get(part, 0) + prod(weight.shape)
    return found


def part_of(name: str, blocks: Iterable[str]) -> str:
    """The block that holds a parameter, else the module."""
    block = next((block for block in blocks if is_inside(name, block)), None)
    return block or name.rpartition(".")[0] or name


def held_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of the storages of these tensors that are not among those `seen`, which are added."""
    total = 0
    for tensor in tensors:
        storage = local_tensor(tensor.detach()).untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
