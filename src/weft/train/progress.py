"""What a run prints: a header, a progress bar (lines where there is no terminal), a summary."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    Progress as Bar,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from weft.core import short_number, translate

from .metrics import Line


class Progress:
    """The progress of a run from step `done` to step `steps`. On a quiet console it costs
    nothing."""

    def __init__(self, console: Console, steps: int, done: int):
        self._console, self._steps = console, steps
        self._bar = Bar(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=4,
            disable=console.quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, completed=done, facts="")

    @property
    def speaks(self) -> bool:
        """Whether it shows anything."""
        return not self._console.quiet

    @speaks.setter
    def speaks(self, value: bool) -> None:
        self._console.quiet = not value

    def step(self, step: int) -> None:
        """A step is done."""
        self._bar.update(self._task, completed=step)

    def log(self, line: Line) -> None:
        """A step was logged; `line` as in metrics.jsonl."""
        facts = describe(line)
        self._bar.update(self._task, facts=facts)
        if self._bar.disable:
            left = timedelta(seconds=round((self._steps - line["step"]) * line["step_s"]))
            self.say(f"step {line['step']}/{self._steps}  {facts}  left {left}")

    def say(self, text: str) -> None:
        """A line of text, above the bar."""
        self._console.print(translate(text), markup=False, highlight=False, soft_wrap=True)

    def table(self, rows: Mapping[str, str]) -> None:
        """Names and values, one a line."""
        width = max(map(len, rows))
        self.say("\n".join(f"{name.ljust(width)}  {value}" for name, value in rows.items()))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()


def describe(line: Line) -> str:
    """Loss, rate and memory of a logged step."""
    facts = [f"loss {line['loss']:.4f}"] if "loss" in line else []
    facts += [
        f"{short_number(value)} {key.removesuffix('_per_s')}/s"
        for key, value in line.items()
        if key.endswith("_per_s")
    ]
    if "sent_bytes" in line:
        facts.append(f"sent {decimal(int(line['sent_bytes']))}")
    if "sync_exposed_s" in line:
        facts.append(f"waited {line['sync_exposed_s']:.2g} s")
    if "busiest_expert" in line:
        facts.append(f"busiest expert {line['busiest_expert']:.3g}x")
    if line.get("dropped_share"):
        facts.append(f"dropped {line['dropped_share']:.1%}")
    if "staleness" in line:
        facts.append(f"{line['staleness']:.2g} steps stale")
    return "  ".join([*facts, decimal(int(line["memory_bytes"]))])
