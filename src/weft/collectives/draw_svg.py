"""An algorithm as SVG: a row per rank, a column after every step, arrows for what is sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape

from weft.pipeline import bytes_text, seconds_text, svg_image, svg_text

from .algorithm import Held, Message
from .chunk_states import run_steps
from .describe import headline, is_final, require_drawable, shown_chunks, time_lines, traffic_line
from .traffic import Traffic

# All in pixels.
MARGIN, LINE = 16.0, 18.0
LETTER = 6.6  # width at font size 12
CHUNK = 15.0  # height of a chunk
GAP, SPACE = 2.0, 16.0  # between the chunks of a rank, between ranks
STRIPE, WHOLE = 7.0, 26.0  # of one rank's input, of a chunk that nothing is added to
ARROW = 72.0  # between columns
SWATCH = 66.0  # of a rank in the legend
SIDE = 92.0  # of what a rank sends and gets
COLOURS = (  # of ranks: told apart in greys too, by their place
    "#3b78d8",
    "#e69138",
    "#4fa64f",
    "#8e63ce",
    "#cc4b4b",
    "#3fb8c4",
    "#a67c3a",
    "#d16fb0",
    "#6f6f6f",
    "#9aae1f",
)
GREY, PALE, INK = "#555555", "#eeeeee", "#222222"


def collective_svg(drawn: Sequence[Traffic]) -> str:
    """One standalone image, the algorithms one under the other. Raises ConfigError for more ranks
    than there are colours."""
    require_drawable(drawn)
    panels = [_Panel(traffic) for traffic in drawn]
    body: list[str] = []
    top = MARGIN
    for panel in panels:
        body += panel.draw(top)
        top += panel.height + LINE
    ranks = max(traffic.algorithm.ranks for traffic in drawn)
    body += _legend(ranks, any(traffic.algorithm.sums for traffic in drawn), top)
    width = max(_legend_width(ranks), *(panel.width for panel in panels))
    said = ". ".join(" ".join((headline(t), *time_lines(t), f"({traffic_line(t)})")) for t in drawn)
    names = ", ".join(traffic.algorithm.name for traffic in drawn)
    return svg_image(width, top + 3 * LINE + MARGIN, body, f"Collectives by steps: {names}", said)


@dataclass(frozen=True)
class _Panel:
    """One algorithm: where its columns and rows stand."""

    traffic: Traffic

    @cached_property
    def shown(self) -> list[list[int]]:
        return shown_chunks(self.traffic)

    @cached_property
    def head(self) -> list[str]:
        return [headline(self.traffic), *time_lines(self.traffic), traffic_line(self.traffic)]

    @property
    def label(self) -> float:
        """Width of a chunk's number."""
        names = [self.traffic.algorithm.chunk_name(c) for chunks in self.shown for c in chunks]
        return 6.0 + 6.0 * max(map(len, names))

    @property
    def box(self) -> float:
        """Width of a chunk."""
        made = self.traffic.algorithm
        return self.label + (STRIPE * made.ranks if made.sums else WHOLE)

    @property
    def left(self) -> float:
        return MARGIN + LETTER * len("rank 0") + 10

    @property
    def columns(self) -> int:
        return len(self.traffic.step_s) + 1

    @property
    def width(self) -> float:
        table = self.x(self.columns - 1) + self.box + 2 * SIDE + MARGIN
        # the first line is larger
        sizes = [len(self.head[0]) * 8.2, *(len(line) * LETTER for line in self.head[1:])]
        return max(table, 2 * MARGIN + max(sizes))

    @property
    def tops(self) -> list[float]:
        """Where each rank begins, below the first."""
        found = [0.0]
        for chunks in self.shown:
            found.append(found[-1] + len(chunks) * (CHUNK + GAP) + SPACE)
        return found

    @property
    def above(self) -> float:
        """Height of the lines above the first rank."""
        return (len(self.head) + 4.4) * LINE

    @property
    def height(self) -> float:
        return self.above + self.tops[-1]

    def x(self, column: int) -> float:
        return self.left + column * (self.box + ARROW)

    def draw(self, top: float) -> Iterator[str]:
        yield svg_text(MARGIN, top + 13, self.head[0], 'font-size="15" font-weight="bold"')
        for row, line in enumerate(self.head[1:], 1):
            yield svg_text(MARGIN, top + 13 + row * LINE, line)
        first = top + self.above
        yield from self._headings(first)
        states = run_steps(self.traffic.algorithm)
        for column, step in enumerate(self.traffic.algorithm.steps):
            for message in step:
                yield self._arrow(message, column, first)
        for column, state in enumerate(states):
            for rank, held in enumerate(state):
                yield from self._rank(column, rank, held, first)
        end = self.x(self.columns - 1) + self.box + SIDE
        for rank, y in enumerate(self.tops[:-1]):
            base = first + y + CHUNK - 4
            yield svg_text(self.left - 10, base, f"rank {rank}", 'text-anchor="end"')
            for place, sums in enumerate((self.traffic.sent_bytes, self.traffic.received_bytes)):
                text = bytes_text(sums[rank])
                yield svg_text(end + place * SIDE, base, text, 'text-anchor="end"')

    def _headings(self, first: float) -> Iterator[str]:
        """Phases over their steps, steps over their arrows, with their time."""
        style = f'text-anchor="middle" fill="{GREY}"'
        yield svg_text(self.x(0) + self.box / 2, first - 8, "before", style)
        column = 0
        for phase in self.traffic.algorithm.phases:
            start, stop = self.x(column) + self.box + 4, self.x(column + len(phase.steps)) - 4
            y = first - 3 * LINE + 6
            edge = f"M{start:.1f} {y + 5:.1f}V{y:.1f}H{stop:.1f}v5"
            yield f'<path d="{edge}" fill="none" stroke="{GREY}"/>'
            lines = _in_two(phase.name, stop - start)
            for row, line in enumerate(reversed(lines)):
                middle = f'text-anchor="middle" fill="{INK}"'
                yield svg_text((start + stop) / 2, y - 5 - row * 14, line, middle)
            for _ in phase.steps:
                x = self.x(column) + self.box + ARROW / 2
                took = seconds_text(self.traffic.step_s[column])
                column += 1
                yield svg_text(x, first - 8 - LINE, f"step {column}", style)
                yield svg_text(x, first - 8, took, f'font-size="11" {style}')
        end = self.x(self.columns - 1) + self.box + SIDE
        for place, word in enumerate(("sends", "gets")):
            grey = f'text-anchor="end" fill="{GREY}"'
            yield svg_text(end + place * SIDE, first - 8, word, grey)

    def _middle(self, rank: int, chunk: int) -> float:
        return self.tops[rank] + self.shown[rank].index(chunk) * (CHUNK + GAP) + CHUNK / 2

    def _arrow(self, message: Message, column: int, first: float) -> str:
        source, target, chunk, op = message
        x1, y1 = self.x(column) + self.box + 1, first + self._middle(source, chunk)
        x2, y2 = self.x(column + 1) - 2, first + self._middle(target, chunk)
        paint, name = COLOURS[source], self.traffic.algorithm.chunk_name(chunk)
        tip = f"step {column + 1}: chunk {name} from rank {source} to rank {target}, {op}"
        dashes = "" if op == "add" else ' stroke-dasharray="4 3"'
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        dx, dy = (x2 - x1) / length, (y2 - y1) / length
        bx, by = x2 - 7 * dx, y2 - 7 * dy  # where the head begins
        corners = ((bx - 3 * dy, by + 3 * dx), (x2, y2), (bx + 3 * dy, by - 3 * dx))
        tips = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        return (
            f'<g><title>{escape(tip)}</title><line x1="{x1:.1f}" y1="{y1:.1f}" x2="{bx:.1f}"'
            f' y2="{by:.1f}" stroke="{paint}" stroke-width="1.4"{dashes}/>'
            f'<polygon points="{tips}" fill="{paint}"/></g>'
        )

    def _rank(self, column: int, rank: int, held: Held, first: float) -> Iterator[str]:
        """The chunks of a rank after so many steps."""
        made, x = self.traffic.algorithm, self.x(column)
        for chunk in self.shown[rank]:
            y = first + self._middle(rank, chunk) - CHUNK / 2
            ranks = held.get(chunk, frozenset())
            final = is_final(self.traffic, rank, chunk, held)
            paint = INK if ranks else "#bbbbbb"
            weight = ' font-weight="bold"' if final else ""
            yield svg_text(
                x + self.label / 2,
                y + CHUNK - 4,
                made.chunk_name(chunk),
                f'font-size="10" text-anchor="middle" fill="{paint}"{weight}',
            )
            left = x + self.label
            if made.sums:
                for each in range(made.ranks):
                    colour = COLOURS[each] if each in ranks else PALE
                    yield _rect(left + each * STRIPE, y, STRIPE, colour)
            elif ranks:
                yield _rect(left, y, WHOLE, COLOURS[min(ranks)])
            edge = (INK, 1.6) if final else ("#999999", 0.8)
            dashes = "" if ranks else ' stroke-dasharray="2 2"'
            yield (
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{self.box:.1f}" height="{CHUNK}" fill="none"'
                f' stroke="{edge[0]}" stroke-width="{edge[1]}"{dashes}/>'
            )


def _in_two(words: str, room: float) -> list[str]:
    """A line, or where there is no room for it two, cut at the first space."""
    first, _, rest = words.partition(" ")
    return [words] if not rest or len(words) * LETTER <= room else [first, rest]


def _rect(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{CHUNK}" fill="{colour}"/>'


def _legend_width(ranks: int) -> float:
    return max(ranks * SWATCH + 6 + LETTER * 26, 420.0) + 2 * MARGIN


def _legend(ranks: int, sums: bool, top: float) -> Iterator[str]:
    """Colours of ranks; the two kinds of arrows; what is bold."""
    x = MARGIN
    for rank in range(ranks):
        yield f'<rect x="{x:.1f}" y="{top:.1f}" width="12" height="13" fill="{COLOURS[rank]}"/>'
        yield svg_text(x + 16, top + 11, f"rank {rank}")
        x += SWATCH
    yield svg_text(x + 6, top + 11, "whose input is in a chunk" if sums else "whose chunk it is")
    kinds = (("added to the receiver's own", ""), ("takes its place", ' stroke-dasharray="4 3"'))
    x, y = MARGIN, top + LINE
    for words, dashes in kinds if sums else kinds[1:]:
        yield (
            f'<line x1="{x:.1f}" y1="{y + 7:.1f}" x2="{x + 28:.1f}" y2="{y + 7:.1f}"'
            f' stroke="{INK}" stroke-width="1.4"{dashes}/>'
        )
        yield svg_text(x + 34, y + 11, words)
        x += 34 + LETTER * len(words) + 24
    y += LINE
    yield (
        f'<rect x="{MARGIN}" y="{y:.1f}" width="28" height="13" fill="none" stroke="{INK}"'
        ' stroke-width="1.6"/>'
    )
    yield svg_text(MARGIN + 34, y + 11, "as the collective promises it at the end")
