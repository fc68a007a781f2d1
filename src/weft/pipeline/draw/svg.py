"""A timeline as SVG: per rank a lane of actions over the curve of its live activations, and a
time axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ..timeline import Label, Lane, Timeline
from . import style as look
from .style import Labelled, whole_step
from .svg_image import svg_image, svg_text

# All in pixels.
MARGIN = 16.0
NARROW, WIDE = 560.0, 1800.0  # of the time axis
LANE, LEAST_LANE = 22.0, 3.0
TALL = 640.0  # what the lanes of one timeline share
CURVE = 0.6  # of a lane
LINE = 18.0  # of writing
DIGIT, LETTER = 6.3, 6.9  # widths, at font sizes 11 and 12
MARK = 2.5  # of an update
LIVE, VERSION = "#c3a5c3", "#8a4b00"
BORDER = (
    3.0  # cells narrower than this have no border of their own: neighbours of one colour are one
)


def svg(timelines: Labelled) -> str:
    """One standalone image. A cell's tooltip says what runs from when to when."""
    page = _page(timelines)
    body: list[str] = []
    top = MARGIN
    for name, timeline in timelines:
        body += _panel(page, name, timeline, top)
        top += _height(timeline) + LINE
    body += _legend(page, timelines, top)
    height = top + LINE * (len(look.kinds(timelines)) + 1) + MARGIN
    names = ", ".join(name for name, _ in timelines)
    said = ". ".join(f"{name}: {look.figures_line(timeline)}" for name, timeline in timelines)
    return svg_image(page.width, height, body, f"What each rank does when: {names}", said)


@dataclass(frozen=True)
class _Page:
    """Where things stand from left to right: ranks, the time axis, idle times, peaks."""

    left: float
    across: float
    span: float  # seconds of `across`
    idle: float
    live: float
    width: float

    def x(self, time: float) -> float:
        return self.left + (time / self.span * self.across if self.span else 0.0)


def _page(timelines: Labelled) -> _Page:
    span, short = look.span_s(timelines), look.short_s(timelines)
    digits = look.digits(timelines) * (1 + any(timeline.versions for _, timeline in timelines))
    across = min(max(span / short * (DIGIT * digits + 9), NARROW), WIDE) if short else NARROW
    ranks = max(len(timeline.lanes) for _, timeline in timelines)
    left = MARGIN + 10 + LETTER * max(len(f"rank {ranks - 1}"), len("time, ms"))
    columns = [_columns(timeline) for _, timeline in timelines]
    idle, live = (LETTER * max(len(word) for found in columns for word in found[i]) for i in (0, 1))
    end = left + across + 16 + idle
    return _Page(left, across, span, end, end + 20 + live, end + 20 + live + MARGIN)


def _columns(timeline: Timeline) -> tuple[list[str], list[str]]:
    """What stands to the right of each rank, with its heading first."""
    idle = [
        f"{look.seconds_text(s)}, {look.share_text(s, timeline.makespan_s)}"
        for s in timeline.idle_s
    ]
    return ["idle", *idle], [
        "peak live",
        *(look.amount_text(timeline, peak) for peak in timeline.peak_memory),
    ]


def _lane_height(timeline: Timeline) -> float:
    return min(LANE, max(LEAST_LANE, TALL / max(len(timeline.lanes), 1) / (1 + CURVE)))


def _height(timeline: Timeline) -> float:
    """Of title, figures, lanes with their curves, and axis."""
    return 2.6 * LINE + (1 + CURVE) * _lane_height(timeline) * len(timeline.lanes) + 1.6 * LINE


def _panel(page: _Page, name: str, timeline: Timeline, top: float) -> Iterator[str]:
    yield svg_text(MARGIN, top + 13, name, 'font-size="15" font-weight="bold"')
    yield svg_text(MARGIN, top + 13 + LINE, look.figures_line(timeline))
    lane, first = _lane_height(timeline), top + 2.6 * LINE
    pitch = (1 + CURVE) * lane
    bottom = first + pitch * len(timeline.lanes)
    idle, live = _columns(timeline)
    for x, heading in ((page.idle, idle[0]), (page.live, live[0])):
        yield svg_text(x, first - 5, heading, 'text-anchor="end" fill="#555555"')
    yield from _axis(page, timeline, first, bottom)
    highest = max(timeline.peak_memory, default=0.0)
    every = math.ceil(13 / pitch)  # ranks that are written out
    for rank, spans in enumerate(timeline.lanes):
        y = first + rank * pitch
        yield from _lane(page, spans, y, lane, timeline.versions)
        yield _curve(page, timeline, rank, y + lane, CURVE * lane - 2, highest)
        for ends in spans.updates.values():
            yield from _versions(page, ends, y, lane)
        if rank % every == 0:
            base = y + min(lane / 2 + 4, pitch)
            yield svg_text(page.left - 8, base, f"rank {rank}", 'text-anchor="end"')
            yield svg_text(page.idle, base, idle[rank + 1], 'text-anchor="end"')
            yield svg_text(page.live, base, live[rank + 1], 'text-anchor="end"')


def _lane(
    page: _Page, lane: Lane, y: float, height: float, versions: Mapping[tuple[int, int], int]
) -> Iterator[str]:
    """Cells; first what is not an action, since actions may overlap with it. Right below a
    microbatch's number stands the version of the weights that it uses."""
    colours = look.palette(lane)

    def cell(label: Label, colour: str, start: float, stop: float) -> str:
        x, wide = page.x(start), page.x(stop) - page.x(start)
        tip = (
            f"<title>{escape(str(label))}: {look.seconds_text(start)} to"
            f" {look.seconds_text(stop)}</title>"
        )
        border = (
            f' stroke="#ffffff" stroke-width="{0.8 if height > 8 else 0.4}"'
            if wide >= BORDER
            else ""
        )
        rect = (
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{wide:.2f}" height="{height:.2f}"'
            f' fill="{colour}"{border}'
        )
        found = f"{rect}>{tip}</rect>" if wide >= BORDER else f"{rect}/>"
        if isinstance(label, str) or height < 11:
            return found
        used = "" if label.kind == "U" else str(versions.get(label[1:], ""))
        small = DIGIT * 0.9 * len(used)  # beside the microbatch's number, lower
        if wide >= DIGIT * len(str(label.microbatch)) + small + 2:
            ground = f'text-anchor="middle" fill="{look.ink(colour)}" pointer-events="none"'
            middle, base = x + (wide - small) / 2, y + height / 2 + 4
            found += svg_text(middle, base, str(label.microbatch), f'font-size="11" {ground}')
            if used:
                right = x + (wide + DIGIT * len(str(label.microbatch))) / 2
                found += svg_text(right, base + 4, used, f'font-size="9" {ground}')
        return found

    for other in (True, False):
        held: tuple[Label, str, float, float] | None = (
            None  # narrow cells of one colour, which grow while they touch
        )
        for label, start, stop in lane.spans:
            if isinstance(label, str) is not other:
                continue
            colour = (
                look.COLOURS.get(label, look.OTHER)
                if isinstance(label, str)
                else colours[label.kind, label.stage]
            )
            narrow = page.x(stop) - page.x(start) < BORDER
            if held and narrow and held[1] == colour and page.x(start) - page.x(held[3]) < 0.1:
                held = label, colour, held[2], stop
                continue
            if held:
                yield cell(*held)
            held = (label, colour, start, stop) if narrow else None
            if not narrow:
                yield cell(label, colour, start, stop)
        if held:
            yield cell(*held)


def _versions(page: _Page, ends: Sequence[float], y: float, height: float) -> Iterator[str]:
    """A mark at each update of a stage's weights, which may take no time, and below it the version
    that they are then, if there is room for it."""
    paint, free = look.COLOURS["U"], -math.inf
    for version, time in enumerate((0.0, *ends)):
        x, wide = page.x(time), DIGIT * len(str(version))
        if version:
            tip = f"<title>version {version} from {look.seconds_text(time)}</title>"
            line = f'x1="{x:.2f}" y1="{y:.2f}" x2="{x:.2f}" y2="{y + height:.2f}"'
            yield f'<line {line} stroke="{paint}" stroke-width="{MARK}">{tip}</line>'
        if x >= free and height >= LANE / 2:
            style = f'font-size="10" text-anchor="middle" fill="{VERSION}"'
            yield svg_text(x, y + height + 9, str(version), style)
            free = x + wide + 2


def _curve(
    page: _Page, timeline: Timeline, rank: int, y: float, height: float, highest: float
) -> str:
    """Live activations over time, below the lane at y: of full `height` where they are the
    `highest` of all ranks."""
    times, values = timeline.memory(rank)
    if len(times) > page.across:  # finer than the picture
        columns = int(page.across)
        values = look.sampled((times, values), page.span, columns)
        times = [page.span * i / columns for i in range(columns)]
    base = y + height
    points = [f"M{page.x(times[0]):.2f} {base:.2f}"]
    for time, value in zip(times, values):
        points.append(
            f"H{page.x(time):.2f}V{base - (height - 1) * (value / highest if highest else 0.0):.2f}"
        )
    points.append(f"H{page.x(timeline.makespan_s):.2f}V{base:.2f}Z")
    return f'<path d="{"".join(points)}" fill="{LIVE}"/>'


def _axis(page: _Page, timeline: Timeline, top: float, bottom: float) -> Iterator[str]:
    """Ticks at whole 1, 2 or 5 times a power of ten."""
    if not page.span:
        return
    unit, size = look.unit_of(page.span)
    step = whole_step(60 / page.across * page.span / size)  # a tick takes 60 pixels
    for tick in range(int(page.span / size / step + 1e-9) + 1):
        x = page.x(tick * step * size)
        yield (
            f'<line x1="{x:.2f}" y1="{top:.2f}" x2="{x:.2f}" y2="{bottom + 4:.2f}"'
            ' stroke="#e4e4e4"/>'
        )
        yield svg_text(
            x, bottom + LINE, look.number_text(tick * step), 'text-anchor="middle" fill="#555555"'
        )
    yield svg_text(
        page.left - 12, bottom + LINE, f"time, {unit}", 'text-anchor="end" fill="#555555"'
    )
    if timeline.makespan_s < page.span:
        x = page.x(timeline.makespan_s)
        yield f'<line x1="{x:.2f}" y1="{top:.2f}" x2="{x:.2f}" y2="{bottom:.2f}" stroke="#999999"/>'


def _legend(page: _Page, timelines: Labelled, top: float) -> Iterator[str]:
    """One line per kind: swatches of its shades, and its name."""
    chunks = max(
        (len(lane.stages) for _, timeline in timelines for lane in timeline.lanes), default=1
    )
    for row, of in enumerate(look.kinds(timelines)):
        paints = look.shades(of, min(max(chunks, 1), 8) if of in look.NAMES else 1)
        y = top + row * LINE
        for i, paint in enumerate(paints):
            yield (
                f'<rect x="{page.left + i * 20:.2f}" y="{y:.2f}" width="18" height="13"'
                f' fill="{paint}"/>'
            )
        named = look.kind_name(of)
        if of == "U" and look.updates(timelines):
            named += "; below it the version of the weights from then on"
            if any(timeline.versions for _, timeline in timelines):
                named += "; low in a cell: the version that it uses"
        yield svg_text(page.left + len(paints) * 20 + 6, y + 11, named)
    y = top + len(look.kinds(timelines)) * LINE
    yield f'<rect x="{page.left:.2f}" y="{y:.2f}" width="18" height="13" fill="{LIVE}"/>'
    yield svg_text(
        page.left + 26,
        y + 11,
        "live activations" + "; lighter above: a rank's later stages" * (chunks > 1),
    )
