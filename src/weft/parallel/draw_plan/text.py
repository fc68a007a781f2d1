"""A Plan in the terminal: a line for each weight, with the ranks' slices, and for each
exchange."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from weft.core import translate

from .describe import fact, legend, name_of, panel_name
from .rows import EdgeCrossing, HeldSlices, PlanRow, PlanRows, is_exchange


def plan_text(rows: PlanRows, *, colour: bool = False) -> Text:
    """All rows, from the top the way of a forward."""
    every = [row for panel in rows.panels for row in panel.rows]
    names = max(len(name_of(row)) for row in every) + 4
    facts = max(cell_len(_said(row)) for row in every) + 2
    said = [text for row in every if isinstance(row, HeldSlices) for text in row.said]
    cell = max(map(len, [*said, *rows.lanes])) + 2
    lines = [Text(translate(rows.head()), style="bold" if colour else ""), Text()]
    lines.append(Text(" " * (names + facts) + "".join(lane.ljust(cell) for lane in rows.lanes)))
    lines[-1].rstrip()
    for panel in rows.panels:
        if panel.modules:
            lines.append(Text(translate(panel_name(panel)), style="bold" if colour else ""))
        for row in panel.rows:
            line = Text(f"  {name_of(row)}".ljust(names) + set_cell_size(_said(row), facts))
            if isinstance(row, HeldSlices):
                line.append("".join(text.ljust(cell) for text in row.said))
            else:
                words = translate(f"forward: {row.forward}, backward: {row.backward}")
                exchanges = is_exchange(row.forward) or is_exchange(row.backward)
                line.append(words, "yellow" if colour and exchanges else "")
            line.rstrip()
            lines.append(line)
    return Text("\n").join([*lines, Text(), *map(Text, map(translate, legend(rows)))])


def _said(row: PlanRow) -> str:
    """Its `fact`, in the language of who reads it. Words that the legend explains stay."""
    if not isinstance(row, EdgeCrossing):
        return fact(row)
    way = translate("enters: ") if row.enters else translate("leaves: ")
    lies = dict.fromkeys([row.before, row.after])
    return way + translate(", then ").join(map(translate, lies))
