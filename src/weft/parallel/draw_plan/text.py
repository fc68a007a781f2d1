"""A Plan in the terminal: a line for each weight, with the ranks' slices, and for each
exchange."""

from __future__ import annotations

from rich.text import Text

from .describe import fact, legend, name_of, panel_name
from .rows import HeldSlices, PlanRows, is_exchange


def plan_text(rows: PlanRows, *, colour: bool = False) -> Text:
    """All rows, from the top the way of a forward."""
    every = [row for panel in rows.panels for row in panel.rows]
    names = max(len(name_of(row)) for row in every) + 4
    facts = max(len(fact(row)) for row in every) + 2
    said = [text for row in every if isinstance(row, HeldSlices) for text in row.said]
    cell = max(map(len, [*said, *rows.lanes])) + 2
    lines = [Text(rows.head(), style="bold" if colour else ""), Text()]
    lines.append(Text(" " * (names + facts) + "".join(lane.ljust(cell) for lane in rows.lanes)))
    lines[-1].rstrip()
    for panel in rows.panels:
        if panel.modules:
            lines.append(Text(panel_name(panel), style="bold" if colour else ""))
        for row in panel.rows:
            line = Text(f"  {name_of(row)}".ljust(names) + fact(row).ljust(facts))
            if isinstance(row, HeldSlices):
                line.append("".join(text.ljust(cell) for text in row.said))
            else:
                words = f"forward: {row.forward}, backward: {row.backward}"
                exchanges = is_exchange(row.forward) or is_exchange(row.backward)
                line.append(words, "yellow" if colour and exchanges else "")
            line.rstrip()
            lines.append(line)
    return Text("\n").join([*lines, Text(), *map(Text, legend(rows))])
