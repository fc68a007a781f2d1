"""Every part of an estimate with its formula and the values in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from weft.core import fill_formula

from ..cost.breakdown import CostPart, TimePart
from ..cost.hardware import GIB
from .ranking import RankedLayout


def explain_row(row: RankedLayout) -> str:
    """Of one choice: seconds and GiB, part by part. Parts that are zero are left out."""
    lines = [
        describe_row(row),
        "",
        f"a step takes {row.step_s:.4g} s" + (", as simulated" if row.simulated else ""),
    ]
    for part in _time(row):
        lines += _part(part, 1.0, "s")
    if row.simulated:
        lines += [
            f"  {'bubble, simulated':<28}{row.time['bubble']:>12.4g} s    includes messages"
            " between stages"
        ]
    held = f"a rank holds {row.held_bytes / GIB:.4g} GiB"
    lines += ["", held if row.fits else f"{held}, which {excess_text(row)}"]
    for part in row.memory_parts:
        lines += _part(part, GIB, "GiB")
    context = row.held_bytes - sum(row.memory.values())
    lines += [f"  {'driver':<28}{context / GIB:>12.4g} GiB  = context_gib of the era"]
    sent = {axis: nbytes for axis, nbytes in row.traffic.items() if nbytes}
    if sent:
        lines += ["", "a rank sends in a step"]
        lines += [f"  {axis:<28}{nbytes / GIB:>12.4g} GiB" for axis, nbytes in sent.items()]
    return "\n".join(lines)


def explain_json(row: RankedLayout) -> dict[str, Any]:
    """The same as one object: of each part its seconds or bytes, its formula, and the values in the
    formula."""
    parts = {"time": _time(row), "memory": row.memory_parts}
    return {kind: [_object(part) for part in found] for kind, found in parts.items()}


def recompute_text(row: RankedLayout) -> str:
    """What runs again in backward, in a word."""
    return "named" if isinstance(row.recompute, tuple) else str(row.recompute)


def describe_row(row: RankedLayout) -> str:
    """One choice in a line."""
    stages = f", {row.schedule}{_options(row.options)}" if row.schedule else ""
    again = f", recompute {recompute_text(row)}" if row.recompute != "none" else ""
    return f"{row.layout}: {row.accumulate} microbatches of {row.microbatch}{stages}{again}"


def excess_text(row: RankedLayout) -> str:
    """By how much one is too large."""
    return f"does not fit by {row.over_bytes / GIB:,.1f} GiB"


def _time(row: RankedLayout) -> list[CostPart]:
    """Less those that a simulation replaced."""
    return [
        part
        for part in row.time_parts
        if part.name in row.time and not (row.simulated and part.name == TimePart.BUBBLE)
    ]


def _object(part: CostPart) -> dict[str, Any]:
    symbols = {name: float(np.ravel(value)[0]) for name, value in part.symbols.items()}
    return {
        "name": part.name,
        "value": float(part.value[0]),
        "formula": part.formula,
        "symbols": symbols,
    }


def _options(options: Mapping[str, int]) -> str:
    return "".join(f", {value} {name}" for name, value in options.items())


def _part(part: CostPart, unit: float, word: str) -> list[str]:
    value = float(part.value[0])
    if not value:
        return []
    head = f"  {part.name:<28}{value / unit:>12.4g} {word:<5}= {part.formula}"
    filled, left = _fill_formula(part)
    lines = [head, f"{'':<47}= {filled}"] if filled != part.formula else [head]
    return lines + (
        [f"{'':<47}with {', '.join(f'{k} = {v}' for k, v in left.items())}"] if left else []
    )


def _fill_formula(part: CostPart) -> tuple[str, dict[str, str]]:
    """The formula with the values in it, and those that have no place in it."""
    values = {name: float(np.ravel(value)[0]) for name, value in part.symbols.items()}
    used = set(re.findall(r"\w+", part.formula))
    filled = fill_formula(part.formula, values)
    return filled, {name: f"{value:.4g}" for name, value in values.items() if name not in used}
