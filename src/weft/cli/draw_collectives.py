"""What `weft draw --collective` does: makes algorithms, and shows or writes their pictures."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.collectives import (
    Links,
    Traffic,
    algorithms,
    collective_svg,
    collective_text,
    traffic_of,
)
from weft.core import ConfigError
from weft.pipeline import print_for_terminal

from .picture_file import require_svg, write_file


def make_collectives(
    names: Sequence[str],
    ranks: int,
    size_bytes: float,
    links: Links,
    options: Mapping[str, str],
) -> list[Traffic]:
    """Each algorithm of these names with what it sends. Of several, each gets the `options` that it
    has. Raises ConfigError."""
    takes = {
        known: inspect.signature(make).parameters for known, make in algorithms.registry().items()
    }
    found = []
    for name in names:
        own: dict[str, Any] = {
            option: _whole_number(option, value)
            for option, value in options.items()
            if option in takes.get(name, ()) or not any(option in takes.get(n, ()) for n in names)
        }
        if "local" in takes.get(name, ()):
            if not links.local:
                fix = "give --local 2"
                raise ConfigError("--local", None, f"{name} needs the ranks of a node", fix)
            own["local"] = links.local
        found.append(traffic_of(algorithms.make_algorithm(name, ranks, **own), size_bytes, links))
    return found


def two_networks(option: str, values: float | tuple[float, ...]) -> tuple[float, float]:
    """What is given within a node and between nodes: one number for both. Raises ConfigError."""
    pair = values if isinstance(values, tuple) else (values, values)
    if len(pair) != 2:
        problem = "not one number, or one for each network"
        raise ConfigError(
            option, pair, problem, "give one number, or two: within a node, between nodes"
        )
    return pair[0], pair[1]


def write_collectives(path: Path, drawn: Sequence[Traffic]) -> None:
    """Raises ConfigError."""
    require_svg(path)
    write_file(path, collective_svg(drawn))


def print_collectives(drawn: Sequence[Traffic]) -> None:
    """Print the steps: in colours where the terminal has them."""
    print_for_terminal(lambda *, colour, **_: collective_text(drawn, colour=colour))


def collective_figures(drawn: Sequence[Traffic]) -> str:
    """A JSON list: of each algorithm its bytes and seconds."""
    return json.dumps([traffic.figures() for traffic in drawn], indent=2)


def _whole_number(option: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"--set {option}", value, "not a whole number", "write one") from None
