"""`train.profile`: chosen steps under torch.profiler, all ranks in one trace.

Each rank is a process of the trace, with its threads as torch.profiler has them. Three things are
added: a thread with the actions of its stages, one with the times in which it computes, and a track
for each kind of communication, from its start to its end, which overlaps with what runs meanwhile.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from weft.core import PROFILE, replace_file
from weft.engine import COMM_PREFIX, CommLabels, Engine, Span

from .overlap.profiled_step import COMPUTES, STAGES, STEP, TRACK, Event

START, CLOCK = "weft: all ranks begin", "weft: clock"
CLOCK_READS = 8
GLOO, OVER, OPERATOR = "gloo:", " over ", "aten::"
BETWEEN_US = 100.0  # between two operators, in Python, at most: a longer gap is a wait
ClockRead = tuple[float, float]  # `time.perf_counter` before and after an event CLOCK


class StepProfiler:
    """Profiles these steps of this rank. All ranks use it."""

    def __init__(self, engine: Engine, steps: range):
        self._engine, self._steps = engine, steps
        self._profile: profile | None = None
        self._spans: list[Span] = []
        self._clock_reads: list[ClockRead] = []

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step."""
        if number not in self._steps:
            yield
            return
        if self._profile is None:
            self._begin()
        self._engine.trace = []
        with CommLabels(self._engine.mesh), record_function(f"{STEP}{number}"):
            yield
        # sums of gradients are among the communication
        self._spans += [span for span in self._engine.trace if span.kind != "reduce"]
        self._engine.trace = None
        if number == self._steps[-1]:
            self.stop()

    def _begin(self) -> None:
        cuda = self._engine.mesh.device.type == "cuda"
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._profile = profile(activities=kinds)
        self._running = True
        self._profile.start()
        self._clock_reads = [_read_clock() for _ in range(CLOCK_READS)]
        if dist.is_initialized():
            dist.barrier()  # one zero for the clocks of all hosts
        with record_function(START):
            pass

    def stop(self) -> None:
        """The last step that is profiled has ended, or the run."""
        if self._profile is not None and self._running:
            self._profile.stop()
            self._running = False

    def finish(self, folder: Path) -> Path | None:
        """Write the trace of all ranks to the run folder. All ranks call it; None: no step was
        profiled."""
        self.stop()
        if self._profile is None:
            return None
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        part = folder / f".{PROFILE}-{rank}"
        # in a folder that is new: torch would follow a link in the place of the part
        with TemporaryDirectory(prefix=f".{PROFILE}-", dir=folder) as own:
            whole = Path(own) / PROFILE
            self._profile.export_chrome_trace(str(whole))
            trace = json.loads(whole.read_text())
            events = rank_events(rank, trace, self._spans, read_zero_s(trace, self._clock_reads))
        replace_file(part, json.dumps(events))
        if dist.is_initialized():
            dist.barrier()
        if rank == 0:
            parts = [folder / f".{PROFILE}-{each}" for each in range(world)]
            merged = [event for each in parts for event in json.loads(each.read_text())]
            whole_trace = {"displayTimeUnit": "ms", "traceEvents": merged}
            replace_file(folder / PROFILE, json.dumps(whole_trace))
            for each in parts:
                each.unlink()
        return folder / PROFILE


class StepRecorder(Protocol):
    def step(self, number: int) -> AbstractContextManager[None]:
        """Around a step."""


@contextmanager
def recorded(recorders: Iterable[StepRecorder], step: int) -> Iterator[None]:
    """All that is around a step."""
    with ExitStack() as stack:
        for each in recorders:
            stack.enter_context(each.step(step))
        yield


def _read_clock() -> ClockRead:
    before = time.perf_counter()
    with record_function(CLOCK):
        pass
    return before, time.perf_counter()


def read_zero_s(trace: Mapping[str, Any], reads: Sequence[ClockRead]) -> float:
    """What `time.perf_counter` showed at START. The two clocks were read together several times:
    the shortest read counts, as the system may stop a process in the middle of one."""
    starts = {name: _starts(trace, name) for name in (START, CLOCK)}
    (before, after), at = min(
        zip(reads, starts[CLOCK], strict=True), key=lambda read: read[0][1] - read[0][0]
    )
    return (before + after) / 2 + (starts[START][0] - at) / 1e6


def _starts(trace: Mapping[str, Any], name: str) -> list[float]:
    return sorted(_start(event) for event in trace["traceEvents"] if event.get("name") == name)


def rank_events(
    rank: int, trace: Mapping[str, Any], spans: list[Span], zero_s: float
) -> list[Event]:
    """What torch.profiler recorded of a rank, as a process of a trace of all, whose zero is where
    all ranks began."""
    events = [dict(event) for event in trace["traceEvents"] if "ts" in event and "pid" in event]
    zero = next(event["ts"] for event in events if event["name"] == START)
    main = next(event["tid"] for event in events if event["name"] == START)
    found: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
        _thread(rank, main, "main"),
        _thread(rank, STAGES, "stages"),
        _thread(rank, COMPUTES, COMPUTES),
    ]
    for event in events:
        if event["ph"] == "M" or event["ts"] < zero:
            continue
        event |= {"pid": rank, "ts": event["ts"] - zero}
        if "id" in event:  # of arrows, which each rank counts from 0
            event["id"] = f"{rank}.{event['id']}"
        found.append(event)
    for number, (label, start, stop) in enumerate([*_messages(found)]):
        common = {"cat": TRACK, "name": label, "pid": rank, "tid": main, "id": f"{rank}.c{number}"}
        found += [{**common, "ph": "b", "ts": start}, {**common, "ph": "e", "ts": stop}]
    for start, stop in _computing(found):
        common = {"cat": COMPUTES, "name": COMPUTES, "pid": rank, "tid": COMPUTES, "ph": "X"}
        found.append({**common, "ts": start, "dur": stop - start})
    for span in spans:
        kind, stage, microbatch = span.action
        start, length = (span.start - zero_s) * 1e6, (span.stop - span.start) * 1e6
        name = str(span.action) if span.kind == "compute" else span.kind
        common = {"cat": STAGES, "name": name, "pid": rank, "tid": STAGES, "ph": "X"}
        where = {"kind": kind, "stage": stage, "microbatch": microbatch}
        found.append({**common, "ts": start, "dur": length, "args": where})
    return found


def _thread(rank: int, tid: int | str, name: str) -> Event:
    return {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}}


def _computing(events: Iterable[Event]) -> list[tuple[float, float]]:
    """(start, stop) of what the device computes: its kernels that are not communication; on CPUs,
    torch's operators."""
    spans = [event for event in events if event["ph"] == "X"]
    kernels = [e for e in spans if e.get("cat") == "kernel" and not _is_nccl_kernel(e)]
    operators = [e for e in spans if e["name"].startswith(OPERATOR)]
    found: list[tuple[float, float]] = []
    for event in sorted(kernels or operators, key=_start):
        start, stop = _start(event), _start(event) + event["dur"]
        if found and start - found[-1][1] <= BETWEEN_US:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def _messages(events: list[Event]) -> Iterator[tuple[str, float, float]]:
    """(label, start, stop) of what was under way. NCCL's work is a kernel, which a labelled call
    has launched. gloo's runs on threads of each group: whose they are is what most of it says that
    begins during a labelled call; where none does, as all calls return at once, that begins after
    one in the same step."""
    spans = [event for event in events if event["ph"] == "X"]
    calls = sorted((e for e in spans if e["name"].startswith(COMM_PREFIX)), key=_start)
    starts = [_start(call) for call in calls]
    kernels = {e["args"]["correlation"]: e for e in spans if _is_nccl_kernel(e)}
    work = [event for event in spans if event["name"].startswith(GLOO)]
    steps = [event for event in spans if event["name"].startswith(STEP)]
    votes: dict[Any, Counter[str]] = {event["tid"]: Counter() for event in work}
    later: dict[Any, Counter[str]] = {event["tid"]: Counter() for event in work}

    def label(event: Event, around: Event | None = None) -> str | None:
        """That of the latest call, if the event begins in it, or in what is `around`."""
        at = bisect_right(starts, _start(event)) - 1
        if at < 0 or not _begins_in(event, around or calls[at]):
            return None
        return str(calls[at]["name"].removeprefix(COMM_PREFIX))

    for event in work:
        if (said := label(event)) is not None:
            votes[event["tid"]][said.partition(OVER)[2]] += 1
        for step in steps:
            if (said := label(event, step)) is not None:
                later[event["tid"]][said.partition(OVER)[2]] += 1
    for event in work:
        axes = (votes[event["tid"]] or later[event["tid"]]).most_common(1)
        name = event["name"].removeprefix(GLOO) + (OVER + axes[0][0] if axes else "")
        yield name, _start(event), _start(event) + event["dur"]
    for event in spans:
        kernel = kernels.get(event.get("args", {}).get("correlation"))
        if kernel is not None and event.get("cat") == "cuda_runtime" and (said := label(event)):
            yield said, _start(kernel), _start(kernel) + kernel["dur"]


def _is_nccl_kernel(event: Event) -> bool:
    return event.get("cat") == "kernel" and "nccl" in event["name"].lower()


def _begins_in(event: Event, around: Event) -> bool:
    return _start(around) <= _start(event) <= _start(around) + float(around["dur"])


def _start(event: Event) -> float:
    return float(event["ts"])
