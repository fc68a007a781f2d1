"""Layouts side by side: what each divides, and of each the parts of its time, what a rank sends,
and the parts of its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from weft.core import Layout, text_table, translate
from weft.parallel import allowed_options, axis_table

from ..cost.hardware import GIB
from .baselines import seconds_by_cause
from .certainty import Certainty
from .ranking import RankedLayout

Cells = tuple[str, list[str]]  # the name of a line, and a cell for each layout


def comparison_table(rows: Sequence[RankedLayout], each: str, sure: Certainty) -> str:
    """A column per layout, in the order given. `each`: what is counted per second, tokens or
    samples; `sure`: how sure each step is. Lines that are zero everywhere are left out."""
    lines: list[Cells] = [
        ("", [row.layout for row in rows]),
        ("schedule", [_schedule(row) for row in rows]),
        ("microbatches", [f"{row.accumulate} x {row.microbatch}" for row in rows]),
        ("recompute", [str(row.recompute) for row in rows]),
        ("", [""] * len(rows)),
        ("step, s", [f"{row.step_s:.4g}" for row in rows]),
        ("  80 % of steps within", [sure.interval_text(place) for place in range(len(rows))]),
        *_parts([seconds_by_cause(row) for row in rows], lambda part: f"  {part}", _share_of(rows)),
        (f"{each}/s", [f"{row.tokens_per_s:,.0f}" for row in rows]),
        ("MFU", [f"{row.mfu:.1%}" for row in rows]),
        ("", [""] * len(rows)),
        ("a rank sends in a step, GiB", [_gib(sum(row.traffic.values())) for row in rows]),
        *_parts([row.traffic for row in rows], lambda axis: f"  over {axis}", _gib_of),
        ("", [""] * len(rows)),
        ("a rank holds, GiB", [_gib(row.held_bytes) for row in rows]),
        *_parts([memory_parts(row) for row in rows], lambda part: f"  {part}", _gib_of),
        ("fits", [_fits(row) for row in rows]),
    ]
    table = [[translate(name), *cells] for name, cells in lines if name != "schedule" or any(cells)]
    return "\n".join(
        [*text_table(table, left=(0,)), "", translate("what ranks divide"), *_granularity(rows)]
    )


def divided_by(layout: str) -> dict[str, list[str]]:
    """Axis -> what its ranks divide."""
    traits = axis_table().traits
    return {
        axis: sorted(str(what) for what in traits[axis].divides)
        for axis in Layout.parse(layout).axes
    }


def memory_parts(row: RankedLayout) -> dict[str, float]:
    """Bytes of a rank, the driver's too; their sum is `held_bytes`."""
    return {**row.memory, "driver": row.held_bytes - sum(row.memory.values())}


def _granularity(rows: Sequence[RankedLayout]) -> Iterator[str]:
    wide = max(len(row.layout) for row in rows)
    for layout in dict.fromkeys(row.layout for row in rows):
        parsed = Layout.parse(layout)
        for number, (axis, what) in enumerate(divided_by(layout).items()):
            known = allowed_options(axis)
            said = [f"+{o}: {known[o]}" for o in parsed.options_of(axis) if o in known]
            name = "" if number else layout
            yield "   ".join(
                ["", f"{name:<{wide}}", "; ".join([f"{axis}: {', '.join(what)}", *said])]
            )


def _parts(
    found: Sequence[Mapping[str, float]],
    name: Callable[[str], str],
    cell: Callable[[int, float], str],
) -> Iterator[Cells]:
    """A line for each part that any layout has."""
    for part in dict.fromkeys(part for parts in found for part in parts):
        values = [parts.get(part, 0.0) for parts in found]
        if any(values):
            yield (
                name(part),
                [cell(i, value) if value else "-" for i, value in enumerate(values)],
            )


def _share_of(rows: Sequence[RankedLayout]) -> Callable[[int, float], str]:
    return lambda i, value: f"{value:.3g} ({value / rows[i].step_s:.0%})"


def _schedule(row: RankedLayout) -> str:
    return row.schedule + "".join(f" x{value}" for value in row.options.values())


def _fits(row: RankedLayout) -> str:
    return translate("yes" if row.fits else f"over by {_gib(row.over_bytes)}")


def _gib_of(_: int, nbytes: float) -> str:
    return _gib(nbytes)


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:,.1f}" if nbytes >= GIB else f"{nbytes / GIB:.2g}"
