"""What a run says of its experts: tokens of each, what was dropped, the gates' own loss, exchanges, and a gate that has
collapsed."""

from __future__ import annotations

import math
from typing import Any

from rich.filesize import decimal

from ..engine import Engine

COLLAPSED = 0.1  # of the way from as few experts as a token needs to all: fewer are in use then


class Gates:
    """Of one run. All ranks call `line` together."""

    def __init__(self, engine: Engine):
        self._engine = engine
        plan = engine.plan
        self._copies = 1 if "tp" in plan.token_axes else plan.layout.size("tp")  # ranks that have the same tokens
        self._fallen: set[str] = set()  # modules of whose gate it has been said
        self._mark = (0, 0.0, 0.0)
        self._totals: dict[str, list[int]] = {}
        self._steps = 0

    def line(self, steps: int, weight: float) -> tuple[dict[str, Any], list[str]]:
        """For metrics.jsonl, of the `steps` steps since the last call, whose losses are means over `weight` things; and
        what is to be said at once."""
        if not self._engine.loads:
            return {}, []
        counts, loss = self._engine.loads.take()
        counts = {module: [n // self._copies for n in row] for module, row in counts.items()}
        for module, row in counts.items():
            before = self._totals.get(module, [0] * len(row))
            self._totals[module] = [a + b for a, b in zip(before, row, strict=True)]
        self._steps += steps
        found: dict[str, Any] = {"tokens_per_expert": {module: row[1:] for module, row in counts.items()}}
        found["busiest_expert"] = max(map(_busiest, counts.values()))
        found["dropped_share"] = _dropped(counts)
        if loss:
            found["gate_loss"] = loss / self._copies / weight
        traffic = self._engine.dispatch
        if traffic.group is not None:
            now = traffic.sent_bytes, traffic.clock.exposed_s, traffic.clock.busy_s
            nbytes, exposed, busy = (b - a for a, b in zip(self._mark, now, strict=True))
            self._mark = now
            found["dispatch_bytes"] = round(nbytes / steps)
            if self._engine.mesh.device.type == "cpu":
                found |= {"dispatch_exposed_s": exposed / steps, "dispatch_hidden_s": max(0.0, busy - exposed) / steps}
        return found, [text for module, row in counts.items() if (text := self._watch(module, row[1:]))]

    def _watch(self, module: str, row: list[int]) -> str | None:
        """A warning, if the gate of this module has just collapsed."""
        active = self._engine.loads.active[module]
        floor = active + COLLAPSED * (len(row) - active)
        if sum(row) < 8 * len(row) or _in_use(row) >= floor:
            self._fallen.discard(module)
            return None
        if module in self._fallen:
            return None
        self._fallen.add(module)
        most = sorted(range(len(row)), key=row.__getitem__, reverse=True)[: math.ceil(floor)]
        share = sum(row[expert] for expert in most) / sum(row)
        return (
            f"warning: the gate of {module} has collapsed: {share:.0%} of its choices are {len(most)} of {len(row)} "
            f"experts ({', '.join(map(str, sorted(most)))}); a loss that balances them, or a bias, keeps all in use"
        )

    def summary(self) -> str | None:
        """Of the whole run."""
        if not self._steps:
            return None
        module = max(self._totals, key=lambda name: _busiest(self._totals[name]))
        row = self._totals[module]
        expert = max(range(len(row) - 1), key=lambda i: row[1 + i])
        text = f"the busiest has {_busiest(row):.2f} times the mean ({expert} of {module})"
        if dropped := _dropped(self._totals):
            text = f"{text}, {dropped:.1%} of choices dropped"
        traffic = self._engine.dispatch
        if traffic.group is None:
            return text
        text = f"{text}; a rank sends {decimal(round(traffic.sent_bytes / self._steps))} a step"
        if self._engine.mesh.device.type == "cpu":
            text = f"{text} and waits {traffic.clock.exposed_s / self._steps:.2g} s"
        return text


def _busiest(row: list[int]) -> float:
    """Choices of the busiest expert beside the mean of all: 1 where they are even."""
    return max(row[1:]) * (len(row) - 1) / max(1, sum(row[1:]))


def _dropped(counts: dict[str, list[int]]) -> float:
    return sum(row[0] for row in counts.values()) / max(1, sum(map(sum, counts.values())))


def _in_use(row: list[int]) -> float:
    """How many experts as busy as each other would have shares with as much entropy."""
    shares = [n / sum(row) for n in row if n]
    return math.exp(-sum(share * math.log(share) for share in shares))
