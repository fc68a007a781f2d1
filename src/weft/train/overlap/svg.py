"""A profiled step as SVG: per rank a lane of computing, and below it one for each communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from weft.pipeline import (
    kind_name,
    number_text,
    seconds_text,
    shades,
    svg_image,
    svg_text,
    unit_of,
    whole_step,
)

from .describe import OTHER, comm_line, headline
from .profiled_step import Interval, ProfiledRank, ProfiledStep, overlap

# All in pixels.
MARGIN, LINE = 16.0, 18.0
LETTER = 6.6  # width at font size 12
ACROSS = 760.0  # of the time axis
LANE, BAR, GAP, SPACE = 22.0, 14.0, 3.0, 14.0  # computing, a message, between them, between ranks
OVERLAPPED, EXPOSED, REST = "#7a4fc0", "#e9dff8", "#c4c4c4"
INK, GREY = "#222222", "#555555"


def overlap_svg(step: ProfiledStep) -> str:
    """One standalone image. A tooltip says from when to when."""
    page = _OverlapPage(step)
    said = ". ".join(
        f"rank {number}, {comm_line(rank, label)}"
        for number, rank in enumerate(step.ranks)
        for label in rank.comms
    )
    title = "Computing and communication of a step, side by side"
    return svg_image(page.width, page.height, page.draw(), title, said)


class _OverlapPage:
    """Where things stand."""

    def __init__(self, step: ProfiledStep):
        self.step = step
        labels = [f"  {label}" for rank in step.ranks for label in rank.comms]
        self.left = MARGIN + LETTER * max(map(len, ["rank 00 computes", *labels])) + 12
        self.width = self.left + ACROSS + MARGIN
        self.top = MARGIN + 2.2 * LINE
        self.rows = [
            {label: _rows(spans) for label, spans in rank.comms.items()} for rank in step.ranks
        ]
        self.bottom = self.top + sum(
            LANE + SPACE + sum(self._tall(rows) for rows in each.values()) for each in self.rows
        )
        self.height = self.bottom + 4.4 * LINE

    def x(self, seconds: float) -> float:
        return self.left + seconds / self.step.stop_s * ACROSS

    def _tall(self, rows: Sequence[Sequence[Interval]]) -> float:
        """Of a communication: its messages, and the line that says how much is overlapped."""
        return len(rows) * (BAR + GAP) + LINE + GAP

    def draw(self) -> Iterator[str]:
        bold = 'font-size="15" font-weight="bold"'
        yield svg_text(MARGIN, MARGIN + 13, headline(self.step), bold)
        yield from self._axis()
        y = self.top
        for number, rank in enumerate(self.step.ranks):
            yield svg_text(MARGIN, y + 15, f"rank {number} computes", 'font-weight="bold"')
            yield from (self._cell(*piece, y) for piece in rank.pieces)
            y += LANE + GAP
            for label, rows in self.rows[number].items():
                yield from self._comm(rank, label, rows, y)
                y += self._tall(rows)
            y += SPACE - GAP
        yield from self._legend()

    def _cell(self, kind: str, start: float, stop: float, y: float) -> str:
        paint = shades(kind, 1)[0] if kind else REST
        tip = f"{kind_name(kind) or OTHER}: {_from_to(start, stop)}"
        return self._rect(start, stop, y, LANE, f'fill="{paint}"', tip)

    def _comm(
        self, rank: ProfiledRank, label: str, rows: Sequence[Sequence[Interval]], top: float
    ) -> Iterator[str]:
        """The messages, numbered by their starts: dark where the rank computes meanwhile."""
        number = {span: place for place, span in enumerate(rank.comms[label], 1)}
        yield svg_text(MARGIN + 10, top + 11, label, f'fill="{GREY}"')
        y = top
        for spans in rows:
            for span in spans:
                tip = f"{label}, number {number[span]}: {_from_to(*span)}"
                yield self._rect(*span, y, BAR, f'fill="{EXPOSED}"', tip)
                for part in overlap([span], rank.computing):
                    yield self._rect(*part, y, BAR, f'fill="{OVERLAPPED}"', tip)
                yield self._rect(*span, y, BAR, f'fill="none" stroke="{INK}"', tip)
                wide, text = self.x(span[1]) - self.x(span[0]), str(number[span])
                if wide > LETTER * len(text) + 4:
                    style = 'text-anchor="middle" font-size="10" stroke="#ffffff"'
                    style += f' stroke-width="3" paint-order="stroke" fill="{INK}"'
                    yield svg_text(self.x(sum(span) / 2), y + 11, text, style)
            y += BAR + GAP
        yield svg_text(self.left, y + 11, comm_line(rank, label), f'fill="{INK}"')

    def _rect(self, start: float, stop: float, y: float, tall: float, style: str, tip: str) -> str:
        x, wide = self.x(start), max(self.x(stop) - self.x(start), 0.4)
        box = f'x="{x:.2f}" y="{y:.1f}" width="{wide:.2f}" height="{tall}"'
        return f"<rect {box} {style}><title>{escape(tip)}</title></rect>"

    def _axis(self) -> Iterator[str]:
        unit, size = unit_of(self.step.stop_s)
        step = whole_step(60 / ACROSS * self.step.stop_s / size)
        for tick in range(int(self.step.stop_s / size / step + 1e-9) + 1):
            x = self.x(tick * step * size)
            line = f'x1="{x:.1f}" y1="{self.top - 4:.1f}" x2="{x:.1f}" y2="{self.bottom:.1f}"'
            yield f'<line {line} stroke="#e4e4e4"/>'
            style = f'text-anchor="middle" fill="{GREY}"'
            yield svg_text(x, self.bottom + LINE - 3, number_text(tick * step), style)
        style = f'text-anchor="end" fill="{GREY}"'
        yield svg_text(self.left - 12, self.bottom + LINE - 3, f"time, {unit}", style)

    def _legend(self) -> Iterator[str]:
        kinds = {kind for rank in self.step.ranks for kind, *_ in rank.pieces}
        first = [
            (shades(kind, 1)[0] if kind else REST, kind_name(kind) or OTHER)
            for kind in sorted(kinds, key=lambda kind: ("FBWU".find(kind) if kind else 9, kind))
        ]
        second = [
            (OVERLAPPED, "communication while the rank computes: overlapped"),
            (EXPOSED, "while it does not: exposed"),
        ]
        for row, swatches in enumerate((first, second)):
            x, y = self.left, self.bottom + (1.4 + row) * LINE
            for paint, word in swatches:
                box = f'x="{x:.1f}" y="{y:.1f}" width="18" height="13"'
                yield f'<rect {box} fill="{paint}"/>'
                yield svg_text(x + 24, y + 11, word)
                x += 24 + LETTER * len(word) + 20


def _rows(spans: Sequence[Interval]) -> list[list[Interval]]:
    """Messages in rows, so that those that run at the same time are one below the other."""
    rows: list[list[Interval]] = []
    for span in spans:
        free = next((row for row in rows if row[-1][1] <= span[0]), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return rows


def _from_to(start: float, stop: float) -> str:
    return f"{seconds_text(start)} to {seconds_text(stop)}"
