"""Curves as SVG: lines over one axis, linear or logarithmic on either side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from . import style
from .style import whole_step
from .svg_image import svg_image, svg_text

# All in pixels.
WIDTH, HEIGHT = 620.0, 360.0
LEFT, RIGHT, TOP, BOTTOM = 84.0, 150.0, 44.0, 56.0
COLOURS = ("#3b78d8", "#e69138", "#4fa64f", "#8e63ce", "#999999")


@dataclass(frozen=True)
class Curve:
    """Points in the order of x. `dashed` marks a curve that is only there for comparison."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


@dataclass(frozen=True)
class AxisMark:
    """A value of x that has a name."""

    name: str
    x: float


@dataclass(frozen=True)
class ChartAxis:
    """An axis of a chart. `log`: logarithmic. `near`: a linear axis begins near its smallest value
    instead of at 0. `ticks`: the values to label; chosen if none are given."""

    name: str
    log: bool = False
    near: bool = False
    ticks: Sequence[float] = ()
    percent: bool = False

    def written(self, value: float) -> str:
        if self.percent:
            return f"{100 * value:.4g} %"
        if value < 1e6:
            return style.number_text(value)
        unit, size = next(
            (unit, size) for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)) if value >= size
        )
        return f"{value / size:.4g}{unit}"


def draw_curves(
    title: str,
    across: ChartAxis,
    up: ChartAxis,
    lines: Sequence[Curve],
    marks: Sequence[AxisMark] = (),
) -> str:
    """Draw curves as one standalone SVG image.

    Args:
        title: Above the image.
        across: The horizontal axis.
        up: The vertical axis.
        lines: The curves.
        marks: Vertical lines with a label.

    Returns:
        The text of an SVG file.
    """
    x = _Scale(across, [v for line in lines for v in line.x], LEFT, WIDTH - RIGHT)
    y = _Scale(up, [v for line in lines for v in line.y], HEIGHT - BOTTOM, TOP)
    names = ", ".join(line.name for line in lines)
    said = f"{up.name} over {across.name}: {names}"
    return svg_image(WIDTH, HEIGHT, _body(title, x, y, lines, marks), title, said)


def stack_images(pictures: Sequence[str], title: str) -> str:
    """Combine images into one of this title, side by side if there is room."""
    sizes = [
        tuple(float(each) for each in _between(picture, 'viewBox="', '"').split()[2:])
        for picture in pictures
    ]
    page = max(2 * WIDTH if len(sizes) > 2 else 0.0, *(width for width, _ in sizes))
    body, left, top, tall = [], 0.0, 0.0, 0.0
    for picture, (width, height) in zip(pictures, sizes, strict=True):
        if left + width > page:
            left, top, tall = 0.0, top + tall, 0.0
        body.append(picture.replace("<svg ", f'<svg x="{left:.0f}" y="{top:.0f}" ', 1))
        left, tall = left + width, max(tall, height)
    return svg_image(page, top + tall, body, title)


class _Scale:
    """Values to pixels."""

    def __init__(self, axis: ChartAxis, values: Sequence[float], start: float, stop: float):
        self.axis, self.start, self.stop = axis, start, stop
        self.low, self.high = min(values), max(values)
        if not axis.log and not axis.near:
            self.low, self.high = 0.0, self.high * 1.05
        elif not axis.log:
            step = whole_step((self.high - self.low) / 5 or self.high or 1.0)
            self.low, self.high = (
                math.floor(self.low / step) * step,
                math.ceil(self.high / step) * step,
            )
        if self.high <= self.low:
            self.high = 2 * self.low or 1.0

    def __call__(self, value: float) -> float:
        if self.axis.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self) -> list[float]:
        if self.axis.ticks:
            return list(self.axis.ticks)
        if not self.axis.log:
            step = whole_step((self.high - self.low) / 6)
            first = math.ceil(self.low / step - 1e-9)
            return [step * i for i in range(first, int(self.high / step + 1e-9) + 1)]
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        wanted = (1, 2, 5) if len(powers) <= 4 else (1,)
        found = [m * 10.0**power for power in powers for m in wanted]
        return [tick for tick in found if self.low * 0.999 <= tick <= self.high * 1.001]


def _body(
    title: str, x: _Scale, y: _Scale, lines: Sequence[Curve], marks: Sequence[AxisMark]
) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    yield svg_text(LEFT, 22, title, 'font-size="15" font-weight="bold"')
    grey, end = 'fill="#555555"', math.inf
    for tick in x.ticks():
        at = x(tick)
        yield f'<line x1="{at:.2f}" y1="{TOP}" x2="{at:.2f}" y2="{bottom + 4}" stroke="#e4e4e4"/>'
        text = x.axis.written(tick)
        if abs(at - end) > 7 * len(text) + 8:
            yield svg_text(at, bottom + 18, text, f'text-anchor="middle" {grey}')
            end = at
    for tick in y.ticks():
        at = y(tick)
        yield f'<line x1="{LEFT - 4}" y1="{at:.2f}" x2="{right}" y2="{at:.2f}" stroke="#e4e4e4"/>'
        yield svg_text(LEFT - 8, at + 4, y.axis.written(tick), f'text-anchor="end" {grey}')
    yield svg_text((LEFT + right) / 2, bottom + 40, x.axis.name, f'text-anchor="middle" {grey}')
    yield svg_text(LEFT, TOP - 8, y.axis.name, grey)
    for row, mark in enumerate(marks):
        at = x(mark.x)
        yield (
            f'<line x1="{at:.2f}" y1="{TOP}" x2="{at:.2f}" y2="{bottom}" stroke="#999999"'
            ' stroke-dasharray="3 3"/>'
        )
        yield svg_text(at + 5, bottom - 10 - 15 * row, mark.name, grey)
    for row, line in enumerate(lines):
        paint = COLOURS[-1] if line.dashed else COLOURS[row % (len(COLOURS) - 1)]
        points = " ".join(f"{x(a):.2f},{y(b):.2f}" for a, b in zip(line.x, line.y, strict=True))
        dashes = ' stroke-dasharray="6 4"' if line.dashed else ""
        yield f'<polyline points="{points}" fill="none" stroke="{paint}" stroke-width="2"{dashes}/>'
        if not line.dashed and len(line.x) <= 40:
            for a, b in zip(line.x, line.y):
                tip = f"<title>{x.axis.written(a)}: {y.axis.written(b)}</title>"
                yield (
                    f'<circle cx="{x(a):.2f}" cy="{y(b):.2f}" r="3.5" fill="{paint}">{tip}</circle>'
                )
        at = TOP + 10 + 20 * row
        ends = f'x1="{right + 14}" y1="{at}" x2="{right + 38}" y2="{at}"'
        yield f'<line {ends} stroke="{paint}" stroke-width="2"{dashes}/>'
        yield svg_text(right + 44, at + 4, line.name)


def _between(text: str, before: str, after: str) -> str:
    return text.split(before, 1)[1].split(after, 1)[0]
