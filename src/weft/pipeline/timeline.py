"""Timeline: when each rank did what, simulated or measured. Pure data; no torch.

    rank 0   0F0 0F1 ... 0B0
    rank 1       1F0 1B0 ...

Time is in seconds, and the first span of all begins at 0.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self, cast

from weft.core import CELL, Action, ConfigError, Kind

Label = Action | str
Span = tuple[Label, float, float]  # what, start_s, stop_s
Steps = tuple[list[float], list[float]]  # from times[i] on it is values[i]


@dataclass(frozen=True)
class Lane:
    """What one rank did, in the order of its starts: `labels[i]` from `start_s[i]` to `stop_s[i]`.

    An action is computing, one at a time. Any other label ("recv-wait", "send", "reduce") names
    what else passed the time, and may overlap with actions. In columns, since a large schedule has
    millions of spans.
    """

    labels: tuple[Label, ...]
    start_s: array[float]
    stop_s: array[float]

    @property
    def spans(self) -> Iterable[Span]:
        return zip(self.labels, self.start_s, self.stop_s)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The stages that this rank computes, in order: its chunks."""
        return tuple(sorted({label.stage for label in self.labels if not isinstance(label, str)}))

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        """Kind of action, or other label -> total seconds."""
        totals: dict[str, float] = {}
        for label, start, stop in self.spans:
            kind = label if isinstance(label, str) else label.kind
            totals[kind] = totals.get(kind, 0.0) + stop - start
        return totals

    @cached_property
    def updates(self) -> Mapping[int, tuple[float, ...]]:
        """Stage -> when its updates end: from the i-th on, its weights are of version i + 1. Empty
        for a synchronous schedule."""
        ends: dict[int, list[float]] = {}
        for label, stop in zip(self.labels, self.stop_s):
            if not isinstance(label, str) and label.kind == "U":
                ends.setdefault(label.stage, []).append(stop)
        return {stage: tuple(ends[stage]) for stage in sorted(ends)}

    @property
    def work_s(self) -> float:
        """Seconds of this rank's actions."""
        return sum(total for kind, total in self.seconds.items() if kind in ("F", "B", "W", "U"))

    def live(self, sizes: Mapping[int, float], freed_by_b: float = 0.0) -> Steps:
        """When how much is live, from {stage: size of one activation}.

        An activation is live from the start of its F to the end of its last backward: W if it has
        one, else B. The share `freed_by_b` of it is freed at the end of the B.
        """
        split = {
            label[1:] for label in self.labels if not isinstance(label, str) and label.kind == "W"
        }
        times, values, now = [0.0], [0.0], 0.0

        def step(time: float, by: float) -> None:
            nonlocal now
            now += by
            if not by:
                return
            if time > times[-1]:
                times.append(time)
                values.append(now)
            else:
                values[-1] = now

        for label, start, stop in self.spans:
            if isinstance(label, str) or label.kind == "U":
                continue
            kind, size = label.kind, sizes[label.stage]
            if kind == "F":
                step(start, size)
            elif kind == "W":
                step(stop, -size * (1 - freed_by_b))
            else:
                step(stop, -size * (freed_by_b if label[1:] in split else 1.0))
        return times, values


@dataclass(frozen=True)
class Timeline:
    """One lane per rank, and the bytes of one microbatch's activations per stage (empty if
    unknown). `versions`: (stage, microbatch) -> the version of the stage's weights that the
    microbatch uses; empty for a synchronous schedule, and of a measured run."""

    lanes: tuple[Lane, ...]
    activation_bytes: tuple[float, ...] = ()
    freed_by_b: float = 0.0
    versions: Mapping[tuple[int, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, ranks: Iterable[Iterable[Span]], activation_bytes: Sequence[float] = ()) -> Self:
        """A timeline from the measured spans of each rank, in any order. All ranks use one clock
        with any zero."""
        columns = [
            tuple(zip(*sorted(spans, key=lambda span: span[1]))) or ((), (), ()) for spans in ranks
        ]
        zero = min((starts[0] for _, starts, _ in columns if starts), default=0.0)
        return cls(
            tuple(
                Lane(
                    labels,
                    array("d", (t - zero for t in starts)),
                    array("d", (t - zero for t in stops)),
                )
                for labels, starts, stops in columns
            ),
            tuple(activation_bytes),
        )

    @cached_property
    def makespan_s(self) -> float:
        """From the first start to the last stop."""
        return max((max(lane.stop_s) for lane in self.lanes if lane.stop_s), default=0.0)

    @cached_property
    def acted_s(self) -> float:
        """From the first start to the stop of the last action."""
        actions = (
            (lane.labels[i], stop) for lane in self.lanes for i, stop in enumerate(lane.stop_s)
        )
        return max((stop for label, stop in actions if not isinstance(label, str)), default=0.0)

    @cached_property
    def ideal_s(self) -> float:
        """Seconds of the busiest rank's actions: no order of the same work is shorter."""
        return max((lane.work_s for lane in self.lanes), default=0.0)

    @property
    def bubble_s(self) -> float:
        """Seconds that the busiest rank waits until the last action is done; 0 if less than
        rounding errors. What follows the last action does not count."""
        waits = self.acted_s - self.ideal_s
        return waits if abs(waits) > 1e-9 * self.acted_s else 0.0

    @property
    def bubble_fraction(self) -> float:
        """The bubble's share of the makespan, (p-1)/(m+p-1) for 1F1B on equal stages."""
        return self.bubble_s / self.makespan_s if self.makespan_s else 0.0

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Rank -> seconds without an action."""
        return tuple(self.makespan_s - lane.work_s for lane in self.lanes)

    @property
    def sized(self) -> bool:
        """Whether memory is in bytes; otherwise it is in microbatches."""
        return any(size != 1 for size in self.activation_bytes)

    @cached_property
    def peak_live(self) -> tuple[float, ...]:
        """Rank -> the most activations live at once, in microbatches of all its stages (1F1B: p,
        p-1, ..., 1)."""
        return tuple(max(self._count_live(lane)[1]) for lane in self.lanes)

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """Rank -> the highest of `memory`."""
        return tuple(max(self.memory(rank)[1]) for rank in range(len(self.lanes)))

    def memory(self, rank: int) -> Steps:
        """(times, values): from times[i] on, live activations are values[i] bytes; microbatches,
        unless `sized`."""
        lane = self.lanes[rank]
        if not self.sized:
            return self._count_live(lane)
        return lane.live(dict(enumerate(self.activation_bytes)), self.freed_by_b)

    @staticmethod
    def _count_live(lane: Lane) -> Steps:
        """Live activations in microbatches. Sums whole numbers, so that nothing is lost to
        rounding."""
        times, values = lane.live(dict.fromkeys(lane.stages, 1))
        return times, [value / max(len(lane.stages), 1) for value in values]

    def summary(self) -> dict[str, Any]:
        """The figures: each one number, or one per rank."""
        return {
            "makespan_s": self.makespan_s,
            "ideal_s": self.ideal_s,
            "bubble_s": self.bubble_s,
            "bubble_fraction": self.bubble_fraction,
            "idle_s": list(self.idle_s),
            "peak_live": list(self.peak_live),
            "peak_memory": list(self.peak_memory),
            "seconds": [dict(lane.seconds) for lane in self.lanes],
        }

    def json(self) -> str:
        """JSON text that `from_json` reads."""
        lanes = [
            {
                "spans": list(map(str, lane.labels)),
                "start_s": list(lane.start_s),
                "stop_s": list(lane.stop_s),
            }
            for lane in self.lanes
        ]
        return json.dumps(
            {
                "activation_bytes": self.activation_bytes,
                "freed_by_b": self.freed_by_b,
                "ranks": lanes,
            },
            allow_nan=False,
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the text that `json` wrote. Raises ConfigError for any other text."""
        try:
            found = json.loads(text)
            lanes = tuple(
                Lane(
                    tuple(map(_label, lane["spans"])),
                    array("d", lane["start_s"]),
                    array("d", lane["stop_s"]),
                )
                for lane in found["ranks"]
            )
            return cls(lanes, tuple(found["activation_bytes"]), found["freed_by_b"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                "timeline", text[:40], f"not a timeline ({error})", "use a file that weft wrote"
            ) from None


def _label(text: str) -> Label:
    """The Action that a label names, or the label itself."""
    if parts := CELL.fullmatch(text):
        return Action(cast(Kind, parts[2]), int(parts[1]), int(parts[3]))
    return text
