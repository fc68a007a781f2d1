"""Reads a run folder into data, also of a run that goes on, that failed, or of an older weft.

Nothing is taken on trust: a file that cannot be read, or holds something else, is named among the
problems, and what it would have said is missing.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.core import (
    CELL,
    EVENTS,
    METRICS,
    PLAN,
    PREDICTION,
    PROFILE,
    RANKS,
    RUN_FILE,
    TRACE,
    VERIFIED,
    Action,
    ConfigError,
    read_file,
)
from weft.pipeline import Timeline
from weft.train import ProfiledStep, last_step

from .texts import Value, text

MOST_BYTES = 1 << 28  # of metrics.jsonl and of a profile
MOST_LINES = 100_000  # of metrics.jsonl that are read: of more, every second, third, ...

Table = dict[str, Any]


@dataclass
class RunRecord:
    """What a run folder holds. `steps`: lines of logged steps, `validations`: those of validations;
    `trace`: its predicted and its measured timeline; `profiled`: the last step of its profile.
    `problems`: files that could not be read."""

    name: str
    run_file: str = ""
    settings: Table = field(default_factory=dict)
    plan: str = ""
    steps: list[Table] = field(default_factory=list)
    validations: list[Table] = field(default_factory=list)
    events: list[Table] = field(default_factory=list)
    ranks: Table = field(default_factory=dict)
    prediction: Table = field(default_factory=dict)
    verified: Table = field(default_factory=dict)
    trace: list[tuple[str, Timeline]] = field(default_factory=list)
    profiled: ProfiledStep | None = None
    problems: list[Value] = field(default_factory=list)

    def setting(self, *keys: str) -> Any:
        """A key of the run file, or None."""
        found: Any = self.settings
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def happened(self, event: str) -> list[Table]:
        """The events of this name."""
        return [each for each in self.events if each.get("event") == event]


def read_run(folder: Path) -> RunRecord:
    """Raises ConfigError where this is no folder of a run."""
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "is not there"
        raise ConfigError("RUN_DIR", str(folder), problem, _FIX)
    if not any((folder / name).exists() for name in (METRICS, RUN_FILE)):
        problem = f"has neither {METRICS} nor {RUN_FILE}: no run of weft train"
        raise ConfigError("RUN_DIR", str(folder), problem, _FIX)
    run = RunRecord(folder.resolve().name)

    def read(name: str, parse: Callable[[bytes], None]) -> None:
        try:
            parse(read_file(folder / name, MOST_BYTES))
        except FileNotFoundError:
            return
        except (OSError, ValueError, LookupError, TypeError, RecursionError, ConfigError) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            run.problems.append(text("problem.file", file=name, why=why))

    def parse_run_file(content: bytes) -> None:
        run.run_file = content.decode(errors="replace")
        run.settings = tomllib.loads(run.run_file)

    def parse_plan(content: bytes) -> None:
        run.plan = content.decode(errors="replace")

    def parse_metrics(content: bytes) -> None:
        texts = content.splitlines()
        every = -(-len(texts) // MOST_LINES)
        for place, line in enumerate(texts):
            if place % every and b'"val_' not in line and place < len(texts) - every:
                continue
            found = _object(line)
            if found is None or as_number(found.get("step")) is None:
                continue  # the last one of a run that goes on may be half written
            (run.validations if "val_loss" in found else run.steps).append(found)

    def parse_events(content: bytes) -> None:
        run.events = [found for line in content.splitlines() if (found := _object(line))]

    def parse_object(name: str) -> Callable[[bytes], None]:
        def parse(content: bytes) -> None:
            found = json.loads(content)
            if not isinstance(found, dict):
                raise ValueError("is no JSON object")
            setattr(run, name, found)

        return parse

    def parse_trace(content: bytes) -> None:
        run.trace = [*timelines(json.loads(content)["traceEvents"])]

    def parse_profile(content: bytes) -> None:
        step = last_step(json.loads(content)["traceEvents"])
        if not math.isfinite(step.stop_s):
            raise ValueError("has times that are not finite")
        run.profiled = step

    read(RUN_FILE, parse_run_file)
    read(PLAN, parse_plan)
    read(METRICS, parse_metrics)
    read(EVENTS, parse_events)
    read(RANKS, parse_object("ranks"))
    read(PREDICTION, parse_object("prediction"))
    read(VERIFIED, parse_object("verified"))
    read(TRACE, parse_trace)
    read(PROFILE, parse_profile)
    return run


_FIX = "name the folder that weft train wrote: run.toml and metrics.jsonl are in it"


def _object(line: bytes) -> Table | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def as_number(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def numbers(table: Any) -> dict[str, float]:
    """The numbers of a table by name; empty for anything else."""
    if not isinstance(table, Mapping):
        return {}
    return {str(k): n for k, v in table.items() if (n := as_number(v)) is not None}


def tables(value: Any) -> list[Table]:
    """The tables of a list; empty for anything else."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def points(lines: list[Table], key: str) -> Iterator[tuple[float, float]]:
    """(step, value) of the lines that have it."""
    for line in lines:
        step, value = as_number(line.get("step")), as_number(line.get(key))
        if step is not None and value is not None:
            yield step, value


def timelines(events: list[Table]) -> Iterator[tuple[str, Timeline]]:
    """The timelines that `weft.pipeline.perfetto` wrote as trace events, with their names."""
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    for pid, name in names.items():
        lanes: dict[int, list[tuple[Any, float, float]]] = {}
        for event in events:
            if event.get("ph") == "X" and event["pid"] == pid:
                cell, start = CELL.fullmatch(event["name"]), float(event["ts"]) / 1e6
                label: Any = str(event["name"])
                if cell and int(event["tid"]) % 2 == 0:
                    label = Action(cell[2], int(cell[1]), int(cell[3]))  # type: ignore[arg-type]
                stop = start + float(event["dur"]) / 1e6
                lanes.setdefault(int(event["tid"]) // 2, []).append((label, start, stop))
        yield str(name), Timeline.of(lanes[rank] for rank in sorted(lanes))
