"""What `weft draw` does: makes schedules, simulates them, and shows or writes the pictures."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from weft.core import ActionCosts, ConfigError, Schedule, from_csv, read_file, to_csv
from weft.pipeline import Timeline, perfetto, print_for_terminal, schedules, simulate, svg, text

from .picture_file import write_file

Drawn = Sequence[tuple[Schedule, Timeline]]


def simulate_schedules(
    names: Sequence[str],
    ranks: int,
    microbatches: int,
    options: Mapping[str, str],
    costs: ActionCosts,
) -> list[tuple[Schedule, Timeline]]:
    """Each schedule of these names or CSV files, and its timeline. One number in `costs` is of a
    whole rank, whose stages share it, so that schedules of any number of stages do the same work.

    `options` are JSON values, or text that is none. Of several schedules, each gets the options
    that it has. Raises ConfigError for what cannot be made, and for an option that none of them
    has.
    """
    made = [
        _read(name)
        if name.endswith(".csv")
        else _make(name, names, ranks, microbatches, options, costs)
        for name in names
    ]
    return [(one, simulate(one, costs.shared(one.placement))) for one in made]


def read_costs(path: Path) -> ActionCosts:
    """Raises ConfigError."""
    try:
        return ActionCosts.from_json(read_file(path).decode())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "--costs", str(path), f"cannot be read ({error})", "name a costs.json"
        ) from None


def write_picture(path: Path, drawn: Drawn) -> None:
    """The picture that the file's suffix names. Raises ConfigError."""
    labelled = _add_labels(drawn)
    if path.suffix == ".svg":
        content = svg(labelled)
    elif path.suffix == ".json":
        content = perfetto(labelled)
    elif path.suffix == ".csv" and len(drawn) == 1:
        content = to_csv(drawn[0][0])
    else:
        raise ConfigError(
            "--out",
            str(path),
            "not a file to draw in",
            "name a .svg, a .json, or one schedule's .csv",
        )
    write_file(path, content)


def print_picture(drawn: Drawn) -> None:
    """Print the picture: as wide as the terminal, in colours where it has them."""
    print_for_terminal(partial(text, _add_labels(drawn)))


def schedule_figures(drawn: Drawn) -> str:
    """A JSON list: of each schedule its name and `Timeline.summary`."""
    return json.dumps(
        [{"schedule": made.name, **timeline.summary()} for made, timeline in drawn], indent=2
    )


def _add_labels(drawn: Drawn) -> list[tuple[str, Timeline]]:
    return [(made.name, timeline) for made, timeline in drawn]


def _read(name: str) -> Schedule:
    try:
        content = read_file(name).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "schedule", name, f"cannot be read ({error})", "name a CSV file"
        ) from None
    made = from_csv(content, Path(name).stem)
    schedules.require_valid(made)
    return made


def _make(
    name: str,
    names: Sequence[str],
    ranks: int,
    microbatches: int,
    options: Mapping[str, str],
    costs: ActionCosts,
) -> Schedule:
    takes = {
        known: inspect.signature(build).parameters for known, build in schedules.registry().items()
    }
    own: dict[str, Any] = {
        option: _value(value)
        for option, value in options.items()
        if option in takes.get(name, ())
        or not any(option in takes.get(other, ()) for other in names)
    }
    if "costs" in takes.get(
        name, ()
    ):  # those of its stages, whose number does not depend on the microbatches
        own["costs"] = costs.shared(schedules.make_schedule(name, ranks, 1, **own).placement)
    return schedules.make_schedule(name, ranks, microbatches, **own)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
