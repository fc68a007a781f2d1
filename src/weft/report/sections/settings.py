"""The resolved run file, the plan, and in what two run files differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .. import blocks
from ..read_run import RunRecord
from ..texts import text


def settings(runs: Sequence[RunRecord]) -> blocks.Section | None:
    shown: list[blocks.Block] = []
    if len(runs) > 1:
        flat = [dict(flatten(run.settings)) for run in runs]
        keys = [*dict.fromkeys(key for each in flat for key in each)]
        rows = [
            [key, *(each.get(key, "") for each in flat)]
            for key in keys
            if len({each.get(key) for each in flat}) > 1
        ]
        names = [run.name for run in runs]
        if rows:
            shown.append(
                blocks.table([text("settings.key"), *names], rows, text("settings.differ"))
            )
        else:
            shown.append(blocks.note(text("settings.same")))
    for run in runs:
        of = "" if len(runs) == 1 else f"{run.name}: "
        if run.run_file:
            shown.append(blocks.code(f"{of}run.toml", run.run_file))
        if run.plan:
            shown.append(blocks.code(f"{of}plan.txt", run.plan))
    return blocks.section("settings", text("settings.title"), text("settings.intro"), shown)


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(`train.steps`, its value as text) of every key."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, default=str, ensure_ascii=False)
