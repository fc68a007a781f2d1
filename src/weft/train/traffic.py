"""What ranks send to each other: bytes of a step by axis, and how long the sums of gradients were waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

from rich.filesize import decimal

from ..comms import sent
from ..engine import Engine
from ..verification.audit import Audit


class Traffic:
    """Of one rank. Bytes are those of the first step that it sees, counted at PyTorch's dispatcher."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._live = bool(engine.plan.layout.live())
        self._mark = (0.0, 0.0)
        self.by_axis: dict[str, float] | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step."""
        if self.by_axis is not None or not self._live:
            yield
            return
        with Audit(self._engine.mesh) as audit:
            yield
        layout = self._engine.plan.layout
        found: dict[str, float] = {}
        for comm in audit.seen:
            size = layout.size(*comm.axis.split("."))
            found[comm.axis] = found.get(comm.axis, 0.0) + sent(comm, size)
        self.by_axis = found

    def line(self, steps: int) -> dict[str, float]:
        """For metrics.jsonl: of a step, as means over the `steps` steps since the last call."""
        if not self._live or self.by_axis is None:
            return {}
        found: dict[str, float] = {"sent_bytes": round(sum(self.by_axis.values()))}
        if self._engine.reducer.buckets and self._engine.mesh.device.type == "cpu":
            clock = self._engine.reducer.clock
            exposed, busy = clock.exposed_s - self._mark[0], clock.busy_s - self._mark[1]
            self._mark = clock.exposed_s, clock.busy_s
            found |= {"sync_exposed_s": exposed / steps, "sync_hidden_s": max(0.0, busy - exposed) / steps}
        return found

    def summary(self) -> str | None:
        """Bytes of a step by axis; and of what an all-reduce of the gradients as they are would send over `dp`."""
        if not self.by_axis:
            return None
        parts = [f"{axis} {decimal(round(nbytes))}" for axis, nbytes in self.by_axis.items()]
        text = f"a rank sends {', '.join(parts)} a step"
        plain = self._plain()
        actual = self.by_axis.get("dp", 0.0)
        return f"{text}; over dp 1/{plain / actual:.3g} of what gradients take" if plain and actual else text

    def _plain(self) -> float:
        plan = self._engine.plan
        if not plan.apart:
            return 0.0
        size = plan.layout.size("dp")
        held = [b for b in self._engine.reducer.buckets if b.number is not None]
        return sum(prod(b.flat.shape) * b.flat.element_size() for b in held) * 2 * (size - 1) / size
