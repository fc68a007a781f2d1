"""What was measured: a cell for each family and layout, and the tables of them."""

from __future__ import annotations

import json
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import parts  # noqa: E402

RESULTS, README = HERE / "results" / "families.json", HERE / "README.md"
OF_PROJECT = HERE.parents[1] / "README.md"
COUNTS = "<!-- counts: written by benchmarks/families/run.py -->"  # in the README of the project
LAYOUTS = ("dp2", "fsdp2", "tp2", "pp2", "cp2", "ep2")
STATES = ("equal", "flagged", "refused", "different", "crashed", "not built")


@dataclass(frozen=True)
class Cell:
    """One family under one layout. `state`: one of STATES; "flagged": loss, gradients and weights
    are equal, but a module, or the collectives, differ. `why` it is not equal. `cut`: share of the
    parameters that tp or ep divides. `attention`: share of the attention modules that tp divides;
    None: the model has none. `error`: the worst relative one. `trained`: whether `weft train` took
    a step."""

    family: str
    layout: str
    state: str
    why: str = ""
    error: float | None = None
    cut: float | None = None
    attention: float | None = None
    seconds: float = 0.0
    trained: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.family, self.layout


def read() -> list[Cell]:
    """The cells that were measured."""
    if not RESULTS.exists():
        return []
    return [Cell(**kept) for kept in json.loads(RESULTS.read_text())["cells"]]


def write(cells: list[Cell], versions: dict[str, str], command: str) -> None:
    found = {"versions": versions, "command": command, "cells": [asdict(cell) for cell in cells]}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=0) + "\n")
    _put(README, parts.BEGIN, tables(cells))
    _put(OF_PROJECT, COUNTS, counts(cells))


def _put(path: Path, begin: str, text: str) -> None:
    head, rest = path.read_text().split(begin)
    path.write_text(f"{head}{begin}\n\n{text}\n\n{parts.END}{rest.split(parts.END, 1)[1]}")


def counts(cells: Iterable[Cell]) -> str:
    """How many families are equal on each layout, and why `cp2` refuses some."""
    lines = ["| | families | equal | refused |", "|---|---:|---:|---:|"]
    for layout in LAYOUTS:
        here = Counter(c.state for c in cells if c.layout == layout and c.state != "not built")
        total = sum(here.values())
        share = f"{here['equal']} ({here['equal'] / max(1, total):.0%})"
        lines.append(f"| `{layout}` | {total} | {share} | {here['refused']} |")
    refused = [c.why for c in cells if c.layout == "cp2" and c.state == "refused"]
    images = sum("samples have no sequence" in why for why in refused)
    samples = sum("whole samples" in why for why in refused)
    unmarked = sum("not known to be a sum over positions" in why for why in refused)
    told = (
        f"Of the {len(refused)} that `cp2` refuses, {images} have no sequence (images), {samples} a"
    )
    told += (
        f" loss of whole samples, and {unmarked} one that is not marked as a sum over positions."
    )
    return "\n".join([*lines, "", *textwrap.wrap(told, 100)])


def tables(cells: list[Cell]) -> str:
    """Counts by layout; then the cells that are not equal, with the reason."""
    layouts = [name for name in LAYOUTS if any(cell.layout == name for cell in cells)]
    lines = ["| layout | families |" + "".join(f" {s} |" for s in STATES[:-1]) + " trained |"]
    lines.append("| --- |" + " ---: |" * (len(STATES) + 1))
    for name in layouts:
        here = Counter(c.state for c in cells if c.layout == name and c.state != "not built")
        each = "".join(f" {here[state]} |" for state in STATES[:-1])
        stepped = sum(c.trained for c in cells if c.layout == name)
        lines.append(f"| `{name}` | {sum(here.values())} |{each} {stepped} |")
    shares = [c.attention for c in cells if c.attention is not None]
    if shares:
        whole = sum(share == 1 for share in shares)
        lines += [
            "",
            f"Of {len(shares)} families with attention, `tp2` divides all of it in {whole}"
            f" ({whole / len(shares):.0%}).",
        ]
    built = {c.family for c in cells if c.state != "not built"}
    missing = sorted({c.family for c in cells} - built)
    if missing:
        lines += ["", f"transformers does not build in small: {', '.join(missing)}."]
    for state in STATES[1:-1]:
        found: dict[str, dict[str, list[str]]] = {}
        for cell in cells:
            if cell.state == state:
                why = found.setdefault(cell.layout, {})
                why.setdefault(shorter(cell.why), []).append(cell.family)
        for layout in (name for name in layouts if name in found):
            lines += ["", f"**{state}, `{layout}`**", ""]
            lines += [f"- {', '.join(names)}: {why}" for why, names in found[layout].items()]
    return "\n".join(lines)


def shorter(why: str) -> str:
    line = " ".join(why.split()).replace("|", "\\|")
    return line if len(line) < 240 else f"{line[:240]} ..."
