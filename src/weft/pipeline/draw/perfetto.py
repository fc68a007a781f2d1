"""A timeline as trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ..timeline import Timeline
from .style import Labelled, kind

Event = dict[str, Any]


def perfetto(timelines: Labelled) -> str:
    """JSON: a process per timeline, a thread per rank, an event per span, a counter of live
    activations per rank.

    Times are in microseconds. What is not an action has a thread of its own beside its rank's, as
    it may overlap.
    """
    events = [
        event
        for pid, (name, timeline) in enumerate(timelines, 1)
        for event in _process(pid, name, timeline)
    ]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, allow_nan=False)


def _process(pid: int, name: str, timeline: Timeline) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for rank, lane in enumerate(timeline.lanes):
        threads = [(2 * rank, f"rank {rank}")]
        if any(isinstance(label, str) for label in lane.labels):
            threads.append((2 * rank + 1, f"rank {rank}: waits and messages"))
        for tid, title in threads:
            common = {"ph": "M", "pid": pid, "tid": tid}
            yield {**common, "name": "thread_name", "args": {"name": title}}
            yield {**common, "name": "thread_sort_index", "args": {"sort_index": tid}}
        for label, start, stop in lane.spans:
            event = {
                "ph": "X",
                "pid": pid,
                "name": str(label),
                "cat": kind(label),
                "ts": _us(start),
            }
            event["dur"] = _us(stop - start)
            if isinstance(label, str):
                yield {**event, "tid": 2 * rank + 1}
            else:
                arguments = {"stage": label.stage, "microbatch": label.microbatch}
                yield {**event, "tid": 2 * rank, "args": arguments}
        unit = "bytes" if timeline.sized else "microbatches"
        for time, value in zip(*timeline.memory(rank)):
            yield {
                "ph": "C",
                "pid": pid,
                "name": f"live, rank {rank}",
                "ts": _us(time),
                "args": {unit: value},
            }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
