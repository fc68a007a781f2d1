"""Metrics of experts: tokens of each, tokens dropped, the gates' loss, exchanges, and a warning
when a gate collapses."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from rich.filesize import decimal

from weft.engine import TrainingEngine
from weft.parallel import (
    FEATURE_AXES,
)

COLLAPSED = 0.1  # of the way from as few experts as a token needs to all: fewer are in use then


class ExpertMetrics:
    """Of one run. All ranks call `line` together."""

    def __init__(self, engine: TrainingEngine):
        self._engine = engine
        self._fallen: set[str] = set()  # modules of whose gate it has been said
        self._mark = (0.0, 0.0, 0.0)
        self._totals: dict[str, list[int]] = {}
        self._steps = 0

    def line(self, steps: int, weight: float) -> tuple[dict[str, Any], list[str]]:
        """For metrics.jsonl, of the `steps` steps since the last call, whose losses are means over
        `weight` things; and what is to be said at once."""
        if not self._engine.loads:
            return {}, []
        counts, loss = self._engine.loads.take()
        plan = self._engine.plan
        # ranks that have the same tokens are all counted
        copies = {
            module: 1 if plan.sliced(module) else plan.layout.size(*FEATURE_AXES)
            for module in counts
        }
        counts = {module: [n // copies[module] for n in row] for module, row in counts.items()}
        for module, row in counts.items():
            before = self._totals.get(module, [0] * len(row))
            self._totals[module] = [a + b for a, b in zip(before, row, strict=True)]
        self._steps += steps
        found: dict[str, Any] = {
            "tokens_per_expert": {module: row[1:] for module, row in counts.items()}
        }
        found["busiest_expert"] = max(map(_busiest, counts.values()))
        found["dropped_share"] = _dropped_share(counts)
        if loss:
            found["gate_loss"] = loss / next(iter(copies.values())) / weight
        if self._engine.dispatch.group is not None:
            now = self._exchanged()
            nbytes, exposed, busy = (b - a for a, b in zip(self._mark, now, strict=True))
            self._mark = now
            found["dispatch_bytes"] = round(nbytes / steps)
            if self._engine.mesh.device.type == "cpu":
                found |= {
                    "dispatch_exposed_s": exposed / steps,
                    "dispatch_hidden_s": max(0.0, busy - exposed) / steps,
                }
        return found, [
            text for module, row in counts.items() if (text := self._watch(module, row[1:]))
        ]

    def drop(self) -> None:
        """Drop what was counted since the last line. All ranks call it together."""
        if self._engine.loads:
            self._engine.loads.take()
            if self._engine.dispatch.group is not None:
                self._mark = self._exchanged()

    def _exchanged(self) -> tuple[float, float, float]:
        """Bytes, seconds waited and seconds under way, since the run began, of the rank that has
        most of each."""
        traffic, mesh = self._engine.dispatch, self._engine.mesh
        own = [float(traffic.sent_bytes), traffic.clock.exposed_s, traffic.clock.busy_s]
        most = torch.tensor(own, dtype=torch.float64, device=mesh.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.group(*mesh.layout.active_axes()))
        nbytes, exposed, busy = most.tolist()
        return nbytes, exposed, busy

    def _watch(self, module: str, row: list[int]) -> str | None:
        """A warning, if the gate of this module has just collapsed."""
        active = self._engine.loads.active[module]
        floor = active + COLLAPSED * (len(row) - active)
        if active == len(row) or sum(row) < 8 * len(row) or _in_use(row) >= floor:
            self._fallen.discard(module)
            return None
        if module in self._fallen:
            return None
        self._fallen.add(module)
        most = sorted(range(len(row)), key=row.__getitem__, reverse=True)[: math.ceil(floor)]
        share = sum(row[expert] for expert in most) / sum(row)
        return (
            f"warning: the gate of {module} has collapsed: {share:.0%} of its choices are"
            f" {len(most)} of {len(row)} experts ({', '.join(map(str, sorted(most)))}); a loss that"
            " balances them, or a bias, keeps all in use"
        )

    def summary(self) -> str | None:
        """Of the whole run."""
        if not self._steps:
            return None
        module = max(self._totals, key=lambda name: _busiest(self._totals[name]))
        row = self._totals[module]
        expert = max(range(len(row) - 1), key=lambda i: row[1 + i])
        text = f"the busiest has {_busiest(row):.2f} times the mean ({expert} of {module})"
        if dropped := _dropped_share(self._totals):
            text = f"{text}, {dropped:.1%} of choices dropped"
        if self._engine.dispatch.group is None:
            return text
        nbytes, exposed, _ = self._mark
        text = f"{text}; a rank sends at most {decimal(round(nbytes / self._steps))} a step"
        if self._engine.mesh.device.type == "cpu":
            text = f"{text} and waits {exposed / self._steps:.2g} s"
        return text


def _busiest(row: list[int]) -> float:
    """Choices of the busiest expert beside the mean of all: 1 where they are even."""
    return max(row[1:]) * (len(row) - 1) / max(1, sum(row[1:]))


def _dropped_share(counts: dict[str, list[int]]) -> float:
    return sum(row[0] for row in counts.values()) / max(
        1, sum(sum(row[1:]) for row in counts.values())
    )


def _in_use(row: list[int]) -> float:
    """How many experts as busy as each other would have shares with as much entropy."""
    shares = [n / sum(row) for n in row if n]
    return math.exp(-sum(share * math.log(share) for share in shares))
