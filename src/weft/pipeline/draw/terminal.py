"""A timeline in the terminal: a row per rank, a cell per action, its microbatch in the cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from weft.core import translate

from ..timeline import Lane, Timeline
from . import style as look
from .style import Labelled

WEIGHTS, USED = "newest", "uses"
CURVE = 32  # columns of a memory curve
RAMP, ASCII_RAMP = "▁▂▃▄▅▆▇█", ".:-=+*%@"
Cell = tuple[str, str]  # a character and its style


def text(
    timelines: Labelled, *, width: int = 120, colour: bool = False, ascii_only: bool = False
) -> Text:
    """All timelines, no line longer than `width` columns (but at least 40).

    With `colour` a cell's background says what runs, lighter for a rank's later stages; without,
    letters do, small for later stages. Where cells do not fit, they shrink, and numbers that do not
    fit are left out; a note says so. Below a rank that updates its weights in between stands the
    version of the weights that each action uses, and the newest one, from where it is there.
    """
    gutter = 2 + max(len(f"rank {len(timeline.lanes) - 1}") for _, timeline in timelines)
    used, newest = translate(USED), translate(WEIGHTS)
    gutter = max(gutter, cell_len(newest) + 1) if look.updates(timelines) else gutter
    room = max(width, 40) - gutter
    scale, note = _scale(timelines, room, colour)
    lines: list[Text] = []
    for name, timeline in timelines:
        head = f"{name}: {translate(look.figures_line(timeline))}"
        lines += [Text(head, style="bold" if colour else "")]
        for rank, lane in enumerate(timeline.lanes):
            lines.append(Text(f"rank {rank}".ljust(gutter)) + _row(lane, scale, colour))
            if timeline.versions:
                lines.append(Text(set_cell_size(used, gutter) + _used(lane, timeline, scale, room)))
            for ends in lane.updates.values():
                lines.append(Text(set_cell_size(newest, gutter) + _versions(ends, scale, room)))
        lines += [Text(), *_table(timeline, gutter, max(width, 40), ascii_only), Text()]
    lines.append(_legend(timelines, colour))
    if note:
        lines.append(Text(translate(note)))
    if not colour:  # where blanks are only blanks
        for line in lines:
            line.rstrip()
    return Text("\n").join(lines)


def _scale(timelines: Labelled, room: int, colour: bool) -> tuple[float, str]:
    """Columns per second, and what to say about it. Whole columns per short action as long as that
    fits."""
    span, short = look.span_s(timelines), look.short_s(timelines)
    if not short:
        return 0.0, ""
    width = look.digits(timelines) + (not colour)  # of a cell's content
    wanted = width + 1
    fits = next((cell for cell in range(wanted, 0, -1) if span / short * cell <= room + 1e-9), None)
    scale = room / span if fits is None else fits / short
    if scale * short >= width - 1e-9:
        return scale, ""
    note = (
        f"condensed: a column is {look.seconds_text(1 / scale)}; an SVG or JSON shows every action"
    )
    return scale, note


def _row(lane: Lane, scale: float, colour: bool) -> Text:
    """One rank's cells."""
    row: list[Cell] = []
    colours = look.palette(lane)
    for other in (True, False):  # actions over what overlaps with them
        for label, start, stop in lane.spans:
            if isinstance(label, str) is not other:
                continue
            # half up, not half to even: equal spans get equal cells
            first, last = int(start * scale + 0.5 + 1e-6), int(stop * scale + 0.5 + 1e-6)
            if first == last:
                continue
            if isinstance(label, str):
                paint = look.COLOURS.get(label, look.OTHER)
                content = " " if colour else "~"
                content *= last - first
            else:
                paint = colours[label.kind, label.stage]
                letter = (
                    ""
                    if colour
                    else label.kind
                    if label.stage == lane.stages[0]
                    else label.kind.lower()
                )
                content = _content(letter, str(label.microbatch), last - first)
            style = f"{look.ink(paint)} on {paint}" if colour else ""
            row += [(" ", "")] * (last - len(row))
            row[first:last] = [(character, style) for character in content]
    line = Text()
    for style, run in groupby(row, key=lambda cell: cell[1]):
        line.append("".join(character for character, _ in run), style)
    return line


def _used(lane: Lane, timeline: Timeline, scale: float, room: int) -> str:
    """Below each forward and backward the version of the weights that it uses, if it fits."""
    row = ""
    for label, start, _ in lane.spans:
        if not isinstance(label, str) and label.kind != "U":
            version = str(timeline.versions[label[1:]])
            column = int(start * scale + 0.5 + 1e-6)
            if column + len(version) <= room and (not row or len(row) < column):
                row = row.ljust(column) + version
    return row


def _versions(ends: Sequence[float], scale: float, room: int) -> str:
    """The version of a stage's weights, where it begins; one that does not fit is left out."""
    row = ""
    for version, time in enumerate((0.0, *ends)):
        column = min(int(time * scale + 0.5 + 1e-6), room - len(str(version)))
        if len(row) < column or not version:
            row = row.ljust(column) + str(version)
    return row


def _content(letter: str, microbatch: str, width: int) -> str:
    """A cell: letter and number, a rule for the rest, a blank before the next. `0F3` in 5 columns:
    `F3-- `."""
    head, rule = letter + microbatch, "-" if letter else " "
    if len(head) < width:
        return head.ljust(width - 1, rule) + " "
    # Side by side, numbers are told apart by letters, or by having one digit.
    if len(head) == width and (letter or width == 1):
        return head
    return letter.ljust(width, rule)


def _table(timeline: Timeline, gutter: int, width: int, ascii_only: bool) -> list[Text]:
    """Per rank: idle time, peak, and the curve of live activations."""
    idle = [
        f"{look.seconds_text(s)}  {look.share_text(s, timeline.makespan_s)}"
        for s in timeline.idle_s
    ]
    live = [look.amount_text(timeline, peak) for peak in timeline.peak_memory]
    titles = [translate("idle"), translate("peak live")]
    wide, tall = (
        max(cell_len(title), *map(len, cells)) for title, cells in zip(titles, (idle, live))
    )
    room = min(CURVE, width - gutter - wide - tall - 4)
    over = "live bytes over time" if timeline.sized else "live microbatches over time"
    waits, peak = (
        " " * (room - cell_len(title)) + title for title, room in zip(titles, (wide, tall))
    )
    head = f"{'':{gutter}}{waits}  {peak}  {translate(over)}"
    lines = [Text(set_cell_size(head, min(cell_len(head), width)))]
    top = max(timeline.peak_memory, default=0.0)
    for rank, (waits, peak) in enumerate(zip(idle, live)):
        curve = look.sampled(timeline.memory(rank), timeline.makespan_s, room) if room > 0 else []
        bars = _bars(curve, top, ASCII_RAMP if ascii_only else RAMP)
        lines.append(Text(f"{f'rank {rank}':{gutter}}{waits:>{wide}}  {peak:>{tall}}  {bars}"))
    return lines


def _bars(values: Sequence[float], top: float, ramp: str) -> str:
    return "".join(
        ramp[math.ceil(value / top * len(ramp) - 1e-9) - 1] if value > 0 else " "
        for value in values
    )


def _legend(timelines: Labelled, colour: bool) -> Text:
    chunks = max(
        (len(lane.stages) for _, timeline in timelines for lane in timeline.lanes), default=1
    )
    line = Text()
    for of in look.kinds(timelines):
        if of in look.NAMES and not colour:
            line.append(f"{of} {translate(look.NAMES[of])}   ")
        elif of in look.NAMES:
            for paint in look.shades(of, chunks):
                line.append(f" {of} ", f"{look.ink(paint)} on {paint}")
            line.append(f" {translate(look.NAMES[of])}   ")
        else:
            line.append(
                *(("  ", f"on {look.COLOURS.get(of, look.OTHER)}") if colour else ("~", ""))
            )
            line.append(f" {of}   ")
    if look.updates(timelines):
        line.append(f"{translate(USED)}, {translate(WEIGHTS)}: ")
        line.append(translate("versions of the weights") + "   ")
    if chunks > 1:
        later = "lighter: a rank's later stages"
        line.append(translate(later if colour else "small letters: a rank's later stages"))
    return line
