"""A profiled step in the terminal: per rank a line of computing, and below it the communication."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

from weft.core import translate
from weft.pipeline import shades

from .describe import comm_line, headline
from .profiled_step import Interval, ProfiledStep, overlap, total_s, union


def overlap_text(step: ProfiledStep, *, width: int = 120, colour: bool = False) -> Text:
    """As wide as the terminal. A column stands for what fills most of it."""
    gutter = max(len("rank 00 "), *(len(label) + 3 for rank in step.ranks for label in rank.comms))
    columns = max(width, 60) - gutter
    lines = [Text(translate(headline(step)), style="bold" if colour else ""), Text()]
    for number, rank in enumerate(step.ranks):
        row = Text(f"rank {number}".ljust(gutter))
        for column in range(columns):
            kind, share = _most(rank.pieces, column, columns, step.stop_s)
            letter = (kind or "o") if share > 0.5 else " "
            paint = f"on {shades(kind, 1)[0]}" if colour and letter != " " else ""
            row.append(letter, paint)
        lines.append(row)
        for label, spans in rank.comms.items():
            busy = union(spans)
            beside = overlap(busy, rank.computing)
            line = Text(f"  {label}".ljust(gutter))
            for column in range(columns):
                under_way = _share(busy, column, columns, step.stop_s)
                hidden = _share(beside, column, columns, step.stop_s)
                line.append(" " if not under_way else "#" if hidden >= under_way / 2 else "-")
            lines += [line, Text(" " * gutter + translate(comm_line(rank, label)))]
        lines.append(Text())
    legend = "F forward, B backward, W weight gradient, o other computing; # overlapped, - exposed"
    lines.append(Text(translate(legend)))
    if not colour:
        for line in lines:
            line.rstrip()
    return Text("\n").join(lines)


def _most(
    pieces: Iterable[tuple[str, float, float]], column: int, columns: int, whole: float
) -> tuple[str, float]:
    """The kind of computing that fills most of a column, and the share of it that is computing."""
    kinds: dict[str, float] = {}
    for kind, start, stop in pieces:
        kinds[kind] = kinds.get(kind, 0.0) + _share([(start, stop)], column, columns, whole)
    most = max(kinds, key=lambda kind: kinds[kind], default="")
    return most, sum(kinds.values())


def _share(spans: Iterable[Interval], column: int, columns: int, whole: float) -> float:
    """The part of a column that these times fill."""
    here = (whole * column / columns, whole * (column + 1) / columns)
    return total_s(overlap([here], spans)) * columns / whole
