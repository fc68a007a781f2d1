"""What happens to a run, in events.jsonl of its folder: starts, restarts, warnings, the end.

A line is one JSON object: `time` (seconds since 1970), `event`, `step` where there is one, `text`,
and at a start and at an end `rows`, the header or the summary that was printed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from weft.core import EVENTS, append_file

RunEvent = Literal[
    "started",
    "resumed",  # from a checkpoint, by --resume or because a process ended
    "died",  # a process ended, and the run goes on
    "rolled_back",  # to the latest checkpoint, by train.rollback
    "left_out",  # a step, by train.skip
    "warning",
    "stopped",
    "finished",
    "failed",
]


class RunEvents:
    """Adds to the events of a run. A folder that cannot be written to ends no run here: the metrics
    beside say so. `writes`: whether this process does; others keep silent."""

    def __init__(self, folder: Path, writes: bool = True):
        self._path, self.writes = folder / EVENTS, writes

    def add(
        self, event: RunEvent, step: int | None, text: str, rows: Mapping[str, str] | None = None
    ) -> None:
        """Append a line; it is on disk for other readers when this returns."""
        if not self.writes:
            return
        line: dict[str, Any] = {"time": time.time(), "event": event}
        line |= {} if step is None else {"step": step}
        line |= {"text": text, **({} if rows is None else {"rows": dict(rows)})}
        with suppress(OSError):
            append_file(self._path, json.dumps(line) + "\n")
