"""Metrics of communication: bytes of a step by axis, seconds waited for gradients, bytes of
calls to workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.filesize import decimal

from weft.core import (
    EXPERTS,
    REPLICA_AXIS,
)
from weft.engine import Audit, Engine, ModuleCalls, Remote, TrainingEngine
from weft.parallel import wire_bytes


class RpcMetrics:
    """Of a driver: what its calls carry there and back, gradients included. The same as `Traffic`
    to who asks."""

    collectives: Sequence[dict[str, Any]] = ()  # calls are none

    def __init__(self, calls: ModuleCalls):
        self._calls, self._steps = calls, 0
        self._mark = self._total = [0, 0, 0]  # calls, bytes sent and bytes that came, in steps

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step."""
        before = self._now()
        yield
        self._steps += 1
        self._total = [t + b - a for t, a, b in zip(self._total, before, self._now(), strict=True)]

    def _now(self) -> tuple[int, int, int]:
        return self._calls.count, self._calls.sent_bytes, self._calls.came_bytes

    def line(self, steps: int) -> dict[str, float]:
        """For metrics.jsonl: of a step, as means over the `steps` steps since the last call."""
        found = [round((b - a) / steps) for a, b in zip(self._mark, self._total, strict=True)]
        self._mark = self._total
        return dict(zip(("calls", "sent_bytes", "came_bytes"), found, strict=True))

    def summary(self) -> str | None:
        if not self._steps or not self._total[0]:
            return None
        count, sent, came = (round(each / self._steps) for each in self._total)
        return f"the driver sends {decimal(sent)} in {count} calls a step, and gets {decimal(came)}"


class CommMetrics:
    """Of one rank. Bytes are counted at PyTorch's dispatcher, in the first step and when the codec
    asks for others."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._live = bool(engine.global_plan.layout.active_axes())
        self._mark = (0.0, 0.0, 0.0)
        self._steps = self._tokens = 0
        self._seen: object = None
        self.by_axis: dict[str, float] | None = None
        self.collectives: list[dict[str, Any]] = []  # of the first step, by kind and axis

    def _asked(self) -> object:
        """What the codec asks for in this step: it may be less than in the first ones."""
        exchange = self._engine.reducer.exchange
        return None if exchange is None else exchange.asks(self._engine.steps_done)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step."""
        self._steps += 1
        if not self._live or (self.by_axis is not None and self._asked() == self._seen):
            yield
            return
        self._seen = self._asked()
        tokens = self._engine.dispatch
        before = tokens.came_bytes
        with Audit(self._engine.mesh, self._engine.now) as audit:
            yield
        layout = self._engine.global_plan.layout
        found: dict[str, float] = {}
        totals: dict[tuple[str, str], list[float]] = {}
        for comm in audit.seen:
            sent = wire_bytes(comm.kind, comm.nbytes, layout.size(*comm.axis.split(".")))
            found[comm.axis] = found.get(comm.axis, 0.0) + sent
            earlier = totals.get((comm.kind, comm.axis), [0, 0, 0])
            own = (1, comm.nbytes, sent)
            totals[comm.kind, comm.axis] = [a + b for a, b in zip(earlier, own, strict=True)]
        if self.by_axis is None:
            keys = ("kind", "axis", "count", "bytes", "sent_bytes")
            self.collectives = [
                dict(zip(keys, (*of, *total), strict=True)) for of, total in totals.items()
            ]
        if (
            tokens.group is not None
        ):  # what travels to experts is other in every step, and counted by itself
            axis = ".".join(layout.active_axes(EXPERTS))
            found[axis] -= wire_bytes(
                "all_to_all", tokens.came_bytes - before, layout.size(EXPERTS)
            )
        self.by_axis = found

    def line(self, steps: int) -> dict[str, float]:
        """For metrics.jsonl: of a step, as means over the `steps` steps since the last call."""
        if not self._live or self.by_axis is None:
            return {}
        outer, reducer = self._engine.replicas.traffic, self._engine.reducer
        clock, apart = (reducer.clock, 0.0) if outer is None else (outer.clock, outer.sent_bytes)
        now = clock.exposed_s, clock.busy_s, apart
        exposed, busy, between = (b - a for a, b in zip(self._mark, now, strict=True))
        self._mark = now
        tokens, self._tokens = (
            self._engine.dispatch.sent_bytes - self._tokens,
            self._engine.dispatch.sent_bytes,
        )
        found: dict[str, float] = {
            "sent_bytes": round(sum(self.by_axis.values()) + (between + tokens) / steps)
        }
        if (outer or reducer.buckets) and self._engine.mesh.device.type == "cpu":
            found |= {
                "sync_exposed_s": exposed / steps,
                "sync_hidden_s": max(0.0, busy - exposed) / steps,
            }
        if staleness := self._engine.replicas.staleness():
            found["staleness"] = sum(staleness) / len(staleness)
        return found

    def summary(self) -> str | None:
        """Bytes of a step by axis; and of what an all-reduce of the gradients as they are would
        send over `dp`."""
        if self.by_axis is None or not self._live:
            return None
        outer, by_axis = self._engine.replicas.traffic, dict(self.by_axis)
        if self._engine.dispatch.group is not None:
            axis = ".".join(self._engine.global_plan.layout.active_axes(EXPERTS))
            by_axis[axis] += self._engine.dispatch.sent_bytes / self._steps
        if outer is not None:
            by_axis[REPLICA_AXIS] = by_axis.get(REPLICA_AXIS, 0.0) + outer.sent_bytes / self._steps
        parts = [f"{axis} {decimal(round(nbytes))}" for axis, nbytes in by_axis.items()]
        text = f"a rank sends {', '.join(parts)} a step"
        plain, actual, sync = (
            self._plain(),
            by_axis.get(REPLICA_AXIS, 0.0),
            self._engine.global_plan.sync,
        )
        if (
            not plain
            or not actual
            or sync is None
            or (outer is None and sync.codec.name == "identity")
        ):
            return text
        return f"{text}; over dp 1/{plain / actual:.3g} of what an all-reduce of gradients sends"

    def _plain(self) -> float:
        engine, size = self._engine, self._engine.global_plan.layout.replica_count
        flats = engine.replicas.exchanged()
        if flats is None:
            flats = [b.flat for b in engine.reducer.buckets if b.number is not None]
        return sum(wire_bytes("all_reduce", flat.nbytes, size) for flat in flats)


def comm_metrics_of(engine: TrainingEngine) -> CommMetrics | RpcMetrics:
    """What this engine's ranks send to each other."""
    if isinstance(engine, Remote):
        return RpcMetrics(engine.calls)
    assert isinstance(engine, Engine)
    return CommMetrics(engine)
