"""What a rank holds under several layouts, as SVG: a bar for each, its parts stacked, and a line
where a device is full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.pipeline import ink, svg_image, svg_text, whole_step

from ..cost.breakdown import MemoryPart
from ..cost.hardware import GIB
from .comparison import memory_parts
from .ranking import RankedLayout

# All in pixels.
LEFT, TOP, TALL = 64.0, 64.0, 380.0
BAR, LETTER = 76.0, 6.8  # least width of a bar, width at font size 12
LEGEND = 150.0
WRITTEN = 14.0  # the height from which on a part's GiB stand in it
COLOURS = {
    MemoryPart.WEIGHTS: "#3b78d8",
    MemoryPart.GATHERED_WEIGHTS: "#9fc0f0",
    MemoryPart.GRADIENTS: "#e69138",
    MemoryPart.DUMMY_GRADIENTS: "#f4c78f",
    MemoryPart.OPTIMIZER: "#4fa64f",
    MemoryPart.AVERAGES: "#a4d3a4",
    MemoryPart.SYNCHRONISER: "#b08d57",
    MemoryPart.ACTIVATIONS: "#8e63ce",
    MemoryPart.WORKING: "#c9b4e8",
    MemoryPart.UPDATE: "#b0893a",
    MemoryPart.START: "#3fb8c4",
    "driver": "#9a9a9a",
}
GREY, RED = "#555555", "#b02a2a"


def memory_svg(rows: Sequence[RankedLayout], device_bytes: float) -> str:
    """One standalone image, the layouts in the order given. `device_bytes`: of one device."""
    names = [_names(row) for row in rows]
    pitch = max(BAR, *(LETTER * len(line) for pair in names for line in pair)) + 22
    highest = max(device_bytes, *(row.held_bytes for row in rows)) * 1.06
    right = LEFT + pitch * len(rows)
    bottom = TOP + TALL
    parts = [part for part in COLOURS if any(memory_parts(row).get(part, 0) for row in rows)]

    def y(nbytes: float) -> float:
        return bottom - nbytes / highest * TALL

    body = [
        svg_text(16, 24, "Memory of a rank, GiB", 'font-size="15" font-weight="bold"'),
        *_axis(highest, right, y(0), TALL),
    ]
    for place, (row, lines) in enumerate(zip(rows, names, strict=True)):
        x, low = LEFT + pitch * place + 11, 0.0
        for part in parts:
            nbytes = memory_parts(row).get(part, 0.0)
            body.append(_part(x, pitch - 22, y(low + nbytes), y(low), part, nbytes))
            low += nbytes
        middle = x + (pitch - 22) / 2
        style = f'text-anchor="middle" font-weight="bold" fill="{"#000000" if row.fits else RED}"'
        body.append(svg_text(middle, y(row.held_bytes) - 5, f"{row.held_bytes / GIB:.1f}", style))
        for number, line in enumerate(lines):
            body.append(svg_text(middle, bottom + 18 + 16 * number, line, 'text-anchor="middle"'))
    full = y(device_bytes)
    line = f'x1="{LEFT}" y1="{full:.1f}" x2="{right:.1f}" y2="{full:.1f}"'
    body.append(f'<line {line} stroke="{RED}" stroke-width="1.4" stroke-dasharray="6 4"/>')
    body.append(svg_text(right + 6, full + 4, f"device: {device_bytes / GIB:.4g}", f'fill="{RED}"'))
    body += _legend(parts, right + 6, full)
    said = ". ".join(
        f"{' '.join(lines).strip()} holds {row.held_bytes / GIB:.1f} GiB: "
        + ", ".join(f"{p} {memory_parts(row).get(p, 0.0) / GIB:.2g}" for p in parts)
        for row, lines in zip(rows, names, strict=True)
    )
    return svg_image(right + LEGEND, bottom + 58, body, "Memory of a rank under each layout", said)


def _names(row: RankedLayout) -> tuple[str, str]:
    return row.layout, row.schedule + "".join(f" x{value}" for value in row.options.values())


def _axis(highest: float, right: float, bottom: float, tall: float) -> Iterator[str]:
    step = whole_step(highest / GIB / 7)
    for tick in range(int(highest / GIB / step + 1e-9) + 1):
        y = bottom - tick * step * GIB / highest * tall
        yield (
            f'<line x1="{LEFT - 4}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>'
        )
        yield svg_text(LEFT - 8, y + 4, f"{tick * step:g}", f'text-anchor="end" fill="{GREY}"')


def _part(x: float, width: float, top: float, bottom: float, part: str, nbytes: float) -> str:
    """A stretch of a bar, with its GiB where there is room."""
    if bottom - top < 0.05:
        return ""
    colour = COLOURS[part]
    found = (
        f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}"'
        f' fill="{colour}" stroke="#ffffff" stroke-width="0.6">'
        f"<title>{part}: {nbytes / GIB:.3g} GiB</title></rect>"
    )
    if bottom - top >= WRITTEN:
        style = f'font-size="11" text-anchor="middle" fill="{ink(colour)}" pointer-events="none"'
        text = f"{nbytes / GIB:.1f}"
        found += svg_text(x + width / 2, (top + bottom) / 2 + 4, text, style)
    return found


def _legend(parts: Sequence[str], x: float, full: float) -> Iterator[str]:
    """Parts in the order of the bars, the topmost first; below the device's line, or above it."""
    tall = 20.0 * len(parts)
    top = full + 20 if full + 20 + tall <= TOP + TALL + 20 else full - tall - 12
    for row, part in enumerate(reversed(parts)):
        y = top + 20 * row
        yield f'<rect x="{x:.1f}" y="{y:.1f}" width="18" height="13" fill="{COLOURS[part]}"/>'
        yield svg_text(x + 24, y + 11, part)
