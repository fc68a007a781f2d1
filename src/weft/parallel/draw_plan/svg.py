"""A Plan as SVG: a column per rank with its slice of each weight, and bars where ranks exchange."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from weft.pipeline import svg_image, svg_text

from .describe import fact, in_words, legend, name_of, panel_name
from .rows import EdgeCrossing, HeldSlices, PlanPanel, PlanRow, PlanRows, is_exchange

# All in pixels.
MARGIN, LINE = 16.0, 18.0
LETTER = 6.6  # width at font size 12
ICON, TALL, THIN = 46.0, 30.0, 8.0  # of a weight: width, height, height with one dim
COLUMN = 150.0  # of a rank, at least
BAR, ROOM = 16.0, 10.0  # of a way over an edge; around each row
HEAD, BELOW = 26.0, 8.0  # of a block, of a panel
COLOURS = (  # of ranks
    "#3b78d8",
    "#e69138",
    "#4fa64f",
    "#8e63ce",
    "#cc4b4b",
    "#3fb8c4",
    "#a67c3a",
    "#d16fb0",
)
INK, GREY, PALE, LINES = "#222222", "#555555", "#eeeeee", "#d4d4d4"
MOVED = "#d5c7f0"  # of what is exchanged


def plan_svg(rows: PlanRows) -> str:
    """One standalone image. Read from top to bottom it is the way of a forward."""
    page = _PlanPage(rows)
    body = [*page.draw()]
    said = ". ".join(in_words(row) for panel in rows.panels for row in panel.rows)
    title = f"What each rank holds, and where ranks exchange: {rows.head()}"
    return svg_image(page.width, page.height, body, title, said)


class _PlanPage:
    """Where things stand."""

    def __init__(self, rows: PlanRows):
        self.rows = rows
        every = [row for panel in rows.panels for row in panel.rows]
        weights = [row for row in every if isinstance(row, HeldSlices)]
        names = [name_of(row) for row in every]
        facts = [fact(row) for row in every]
        self.facts = MARGIN + 10 + LETTER * max(map(len, names)) + 16
        self.left = self.facts + LETTER * max(map(len, facts)) + 20
        said = max((len(text) for row in weights for text in row.said), default=0)
        self.column = max(COLUMN, ICON + 14 + LETTER * said)
        self.right = self.left + self.column * len(rows.lanes)
        self.width = self.right + MARGIN
        self.top = MARGIN + 3.2 * LINE
        self.end = self.top + sum(map(_panel_height, rows.panels))
        self.height = self.end + (len(legend(rows)) + 1) * LINE

    def x(self, place: int) -> float:
        """Of the middle of a rank's weights."""
        return self.left + self.column * place + ICON / 2 + 6

    def draw(self) -> Iterator[str]:
        yield svg_text(MARGIN, MARGIN + 13, self.rows.head(), 'font-size="15" font-weight="bold"')
        for place, lane in enumerate(self.rows.lanes):
            style = f'text-anchor="middle" font-weight="bold" fill="{COLOURS[place]}"'
            yield svg_text(self.x(place), self.top - 12, lane, style)
            line = f'x1="{self.x(place):.1f}" y1="{self.top - 6:.1f}" x2="{self.x(place):.1f}"'
            yield f'<line {line} y2="{self.end:.1f}" stroke="{LINES}" stroke-width="2"/>'
        y = self.top
        for panel in self.rows.panels:
            yield from self._panel(panel, y)
            y += _panel_height(panel)
        yield from self._legend()

    def _panel(self, panel: PlanPanel, top: float) -> Iterator[str]:
        y = top
        if panel.modules:
            y += HEAD
            sides = f'x="{MARGIN - 6:.1f}" y="{top + 2:.1f}" rx="4"'
            wide, tall = self.width - 2 * MARGIN + 12, _panel_height(panel) - BELOW
            box = f'{sides} width="{wide:.1f}" height="{tall:.1f}"'
            yield f'<rect {box} fill="none" stroke="#999999"/>'
            yield svg_text(MARGIN, top + 18, panel_name(panel), 'font-weight="bold"')
        for row in panel.rows:
            base = y + _height(row) / 2 + 4
            indent = MARGIN + 10
            if isinstance(row, HeldSlices):
                yield svg_text(indent, base, name_of(row))
                yield from (self._slice(row, place, y) for place in range(len(self.rows.lanes)))
            else:
                bold = ' font-weight="bold"' if row.letter else ""
                yield svg_text(indent, base, name_of(row), f'fill="{INK}"{bold}')
                yield from self._crossing(row, y)
            yield svg_text(self.facts, base, fact(row), f'fill="{GREY}"')
            y += _height(row)

    def _crossing(self, row: EdgeCrossing, top: float) -> Iterator[str]:
        """Two bars over all ranks: forward, and below it backward."""
        wide, y = self.right - self.left, top + ROOM / 2
        for way, done in (("\u2193 forward", row.forward), ("\u2191 backward", row.backward)):
            box = f'x="{self.left:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{BAR}"'
            paint = MOVED if is_exchange(done) else PALE
            yield f'<rect {box} fill="{paint}" stroke="#bbbbbb"/>'
            style = f'text-anchor="middle" fill="{INK}"'
            yield svg_text(self.left + wide / 2, y + 12, f"{way}: {done}", style)
            y += BAR

    def _slice(self, row: HeldSlices, place: int, top: float) -> str:
        """A weight, and in a rank's colour its slice of it."""
        wide, tall = _icon(row)
        x, y = self.x(place) - wide / 2, top + (_height(row) - tall) / 2
        box = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}"'
        parts = [f'<rect {box} fill="#ffffff"/>']
        for start, stop in row.spans[place]:
            if row.cut == "rows":
                own = (x, y + tall * start, wide, tall * (stop - start))
            else:
                own = (x + wide * start, y, wide * (stop - start), tall)
            sides = 'x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"'.format(*own)
            parts.append(f'<rect {sides} fill="{COLOURS[place]}"/>')
        dashes = ' stroke-dasharray="3 2"' if row.summed else ""
        parts.append(f'<rect {box} fill="none" stroke="{INK}" stroke-width="0.9"{dashes}/>')
        base = top + _height(row) / 2 + 4
        words = svg_text(self.x(place) + ICON / 2 + 6, base, row.said[place])
        tip = escape(f"{row.weight}, {self.rows.lanes[place]}: {row.said[place]}")
        return f"<g><title>{tip}</title>{''.join(parts)}</g>{words}"

    def _legend(self) -> Iterator[str]:
        y = self.end + 8
        for row, line in enumerate(legend(self.rows)):
            yield svg_text(MARGIN, y + 11 + row * LINE, line, f'fill="{GREY}"')


def _height(row: PlanRow) -> float:
    return ROOM + (2 * BAR if isinstance(row, EdgeCrossing) else max(_icon(row)[1], 12.0))


def _panel_height(panel: PlanPanel) -> float:
    return (HEAD if panel.modules else 0.0) + sum(map(_height, panel.rows)) + BELOW


def _icon(row: HeldSlices) -> tuple[float, float]:
    """Width and height of a weight. The dim that columns or one dim cut lies across, that of rows
    down; the other dims are the other side."""
    if len(row.shape) < 2:
        return ICON, THIN
    cut = row.shape[row.dim]
    other = 1
    for number, size in enumerate(row.shape):
        other *= size if number != row.dim else 1
    wide, tall = (other, cut) if row.cut == "rows" else (cut, other)
    scale = min(ICON / wide, TALL / tall)
    return max(wide * scale, 12.0), max(tall * scale, 12.0)
