"""What a run measures, written to metrics.jsonl.

A line of metrics.jsonl is one JSON object, of a logged step or of a validation:

    {"step": 10, "loss": 3.2, "lr": 0.01, "tokens_per_s": 810.0, "step_s": 0.25, "memory_bytes":
    41200000, "epoch": 1.5} {"step": 10, "val_loss": 3.3}

`loss` is that of the step alone, `step_s` and the rate are means since the line before; `grad_norm`
stands where it was computed, and `skipped` counts steps since the line before that were not taken:
by fp16, or by `train.skip`; `batches_left_out` those that `train.rollback` has passed over so far.
`data_wait_s` is the seconds of a step in which this rank waited for its batch, as a mean.
With more ranks than one, `sent_bytes` is what a rank sends in a step, and on CPUs `sync_exposed_s`
and `sync_hidden_s` are the seconds of a step in which sums of gradients were waited for, and in
which they were under way beside other work. Where replicas step by themselves `replicas` counts
those that take part; with asynchronous servers `staleness` is how many steps weights were behind
the fastest replica's, as a mean.
`slowest_rank` took longest for its own part of a step, without waits for other ranks, beside the
median of the ranks with the same work: `slowest_ratio` times as long, `slowest_own_s` seconds.

Of a model with experts, `tokens_per_expert` has for every module that holds some how many choices
each had since the line before, `busiest_expert` those of the busiest beside the mean, at most over
modules, and `dropped_share` is the part of all choices for which there was no room. `gate_loss` is
what gates added to the loss. Where tokens travel, `dispatch_bytes` is what a rank sends of them in
a step, `dispatch_exposed_s` and `dispatch_hidden_s` are as above.

Loggers get the same names, but for `tokens_per_expert`.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core import METRICS, ConfigError, WeftError, append_file, read_file, replace_file

MOST_BYTES = 1 << 32  # of metrics.jsonl
MOST_KEPT = 10_000  # lines of a process that does not write, until it may have to
Line = Mapping[str, Any]


class Metrics:
    """Writes the lines of a run that has done `done` steps; what an earlier run wrote about later
    ones is dropped, if this process `writes` from now on, and not another one. Who writes later
    adds what is not there of the lines that it has kept. `log` is called with each line that this
    process has written."""

    def __init__(
        self,
        folder: Path,
        done: int,
        writes: bool = True,
        log: Callable[[Line], None] = lambda line: None,
    ):
        self._log = log
        self._path = folder / METRICS
        self._writes, self._kept = writes, deque[Line](maxlen=MOST_KEPT)
        self._there = set[tuple[int, bool]]()  # by another process, when this one began to write
        if writes and os.path.lexists(self._path):  # a link is none of weft's
            keep_until(self._path, done)

    def write(self, line: Line, leads: bool = True) -> None:
        """Append a line; it is on disk for other readers when this returns. Who does not lead
        keeps it: that another one has ended is known later than its last line. Raises
        WeftError."""
        if not leads:
            self._writes = False
            self._kept.append(line)
            return
        if not self._writes:
            self._there = self._written_since(self._kept[0] if self._kept else line)
        with self._on_disk():
            for each in (*self._kept, line):
                if _subject(each) not in self._there:
                    self._append(each)
        self._writes = True
        self._kept.clear()

    def _written_since(self, first: Line) -> set[tuple[int, bool]]:
        """What another process has written from this line on."""
        texts = keep_until(self._path, sys.maxsize) if os.path.lexists(self._path) else []
        found = map(json.loads, texts)
        return {_subject(line) for line in found if line["step"] >= first["step"]}

    def _append(self, line: Line) -> None:
        append_file(self._path, json.dumps(line, allow_nan=False) + "\n")
        self._log(line)

    def back_to(self, step: int) -> None:
        """Drop the lines past this step: the steps are taken again."""
        self._kept.clear()
        self._there.clear()
        if self._path.exists():
            keep_until(self._path, step)

    @contextmanager
    def _on_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            problem = f"cannot be written ({error.strerror or error})"
            raise WeftError(f"{self._path.parent}: metrics {problem}; --resume goes on") from None


def _subject(line: Line) -> tuple[int, bool]:
    """What a line is of: a step, or the validation after it."""
    return line["step"], "val_loss" in line


def keep_until(path: Path, step: int) -> list[str]:
    """Drop the lines past this step from a metrics file, and a last line that a crash cut short.
    Returns those that stay. Raises ConfigError."""
    kept = []
    try:
        whole = read_file(path, MOST_BYTES).decode(errors="replace")
    except OSError as error:
        fix = "remove it, or name another folder with --output"
        problem = f"cannot be read ({error.strerror or error})"
        raise ConfigError("metrics", str(path), problem, fix) from None
    for text in whole.splitlines():
        try:
            if json.loads(text)["step"] <= step:
                kept.append(text + "\n")
        except (ValueError, LookupError, TypeError, RecursionError):
            break
    replace_file(path, "".join(kept))
    return kept


class StepTimer:
    """Seconds of training, lap after lap; what passes under `pause` does not count."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self.total_s = 0.0

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        lap_s, self._since = now - self._since, now
        self.total_s += lap_s
        return lap_s

    @contextmanager
    def pause(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began


class WaitTimer:
    """Seconds that pass inside of `with`."""

    def __init__(self) -> None:
        self.total_s = self._told_s = 0.0

    def lap(self) -> float:
        """Those since the last lap."""
        lap_s, self._told_s = self.total_s - self._told_s, self.total_s
        return lap_s

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.total_s += time.perf_counter() - self._since


def rate_unit(sample: Mapping[str, Tensor], batch: int) -> tuple[str, int]:
    """What a rate counts, "tokens" where samples are sequences of ids and else "samples", and how
    many a step has."""
    ids = sample.get("input_ids")
    return ("samples", batch) if ids is None else ("tokens", batch * ids.numel())


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this rank has held: allocated tensors on CUDA, the resident process on a
    CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def highest_over_ranks(value: int) -> int:
    """The highest of all ranks' values, on every rank. Called by all ranks together."""
    if not dist.is_initialized():
        return value
    shared = torch.tensor(value)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return int(shared)
