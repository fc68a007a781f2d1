"""What all drawings share: colours and names of what a rank does, scale, and how figures are
written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from ..timeline import Label, Lane, Steps, Timeline

Labelled = Sequence[tuple[str, Timeline]]

NAMES = {"F": "forward", "B": "backward", "W": "weight gradient", "U": "update"}
COLOURS = {  # of the papers: F blue, B aqua, W green
    "F": "#3b78d8",
    "B": "#3fb8c4",
    "W": "#4fa64f",
    "U": "#e69138",
    "recv-wait": "#dcdcdc",
    "send": "#cbb896",
    "reduce": "#b39ddb",
    "gather": "#d5c7f0",
    "optimizer": "#e69138",
}
OTHER = "#c4c4c4"
SAMPLES = 64  # durations read per lane, to choose a scale


def kind(label: Label) -> str:
    """The kind of an action, or the label itself."""
    return label if isinstance(label, str) else label.kind


def kind_name(of: str) -> str:
    """The kind of an action in words, or the label itself."""
    return NAMES.get(of, of)


def shades(of: str, chunks: int) -> list[str]:
    """The colours of a kind, one for each of a rank's `chunks` stages: later ones are lighter."""
    red, green, blue = (int(COLOURS.get(of, OTHER)[i : i + 2], 16) for i in (1, 3, 5))
    fade = [0.55 * chunk / max(chunks - 1, 1) for chunk in range(chunks)]
    return [
        "#" + "".join(f"{round(c + (255 - c) * f):02x}" for c in (red, green, blue)) for f in fade
    ]


def palette(lane: Lane) -> dict[tuple[str, int], str]:
    """(kind of action, stage) -> colour on this lane."""
    return {
        (of, stage): colour
        for of in ("F", "B", "W", "U")
        for stage, colour in zip(lane.stages, shades(of, len(lane.stages)))
    }


def ink(colour: str) -> str:
    """Black or white, whichever is read better on this colour."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def kinds(timelines: Labelled) -> list[str]:
    """What occurs, actions first."""
    found = {of for _, timeline in timelines for lane in timeline.lanes for of in lane.seconds}
    return [of for of in NAMES if of in found] + sorted(found - set(NAMES))


def updates(timelines: Labelled) -> bool:
    """Whether stages update their weights while others compute."""
    return any(lane.updates for _, timeline in timelines for lane in timeline.lanes)


def span_s(timelines: Labelled) -> float:
    """Seconds of the time axis."""
    return max((timeline.makespan_s for _, timeline in timelines), default=0.0)


def short_s(timelines: Labelled) -> float:
    """Seconds of a short action: nine of ten take at least as long. 0 where none takes any time."""

    def durations(lane: Lane) -> Iterator[float]:
        step = len(lane.labels) // SAMPLES | 1  # odd: actions alternate
        return (
            stop - start
            for label, start, stop in islice(lane.spans, 0, None, step)
            if not isinstance(label, str)
        )

    found = sorted(
        d for _, timeline in timelines for lane in timeline.lanes for d in durations(lane) if d > 0
    )
    return found[len(found) // 10] if found else 0.0


def digits(timelines: Labelled) -> int:
    """How wide the highest microbatch's number is."""
    highest = (
        max((label.microbatch for label in lane.labels if not isinstance(label, str)), default=0)
        for _, timeline in timelines
        for lane in timeline.lanes
    )
    return len(str(max(highest, default=0)))


def sampled(steps: Steps, span: float, columns: int) -> list[float]:
    """The highest value within each of `columns` equal parts of `span` seconds."""
    found = [0.0] * columns
    times, values = steps
    for start, stop, value in zip(times, [*times[1:], span], values):
        first = min(int(start / span * columns + 1e-9), columns - 1) if span else 0
        last = min(math.ceil(stop / span * columns - 1e-9), columns) if span else 0
        for column in range(first, last):
            found[column] = max(found[column], value)
    return found


def unit_of(value: float) -> tuple[str, float]:
    """The unit to write these seconds in, and its size in seconds."""
    return next(
        (unit for unit in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)) if abs(value) >= unit[1]),
        ("ns", 1e-9),
    )


def seconds_text(value: float) -> str:
    """As in 12.5 ms. Below a picosecond, which is rounding, 0 s."""
    unit, size = unit_of(value) if abs(value) >= 1e-12 else ("s", 1.0)
    return f"{number_text(value / size)} {unit}"


def number_text(value: float) -> str:
    """Four digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def amount_text(timeline: Timeline, value: float) -> str:
    """Live activations: bytes where sizes are known, else microbatches."""
    return bytes_text(value) if timeline.sized else number_text(value)


def bytes_text(value: float) -> str:
    """As in 12.5 MB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} B"


def share_text(part: float, whole: float) -> str:
    """`part` as a percentage of `whole`."""
    return f"{100 * part / whole if whole else 0.0:.1f} %"


def figures_line(timeline: Timeline) -> str:
    """One line: makespan, ideal, bubble, and the rest of the makespan, where something follows the
    last action."""
    bubble = (
        f"{seconds_text(timeline.bubble_s)} ({share_text(timeline.bubble_s, timeline.makespan_s)})"
    )
    after = timeline.makespan_s - timeline.acted_s
    rest = f", then {seconds_text(after)}" if after > 0 else ""
    return (
        f"makespan {seconds_text(timeline.makespan_s)}, ideal {seconds_text(timeline.ideal_s)},"
        f" bubble {bubble}{rest}"
    )


def whole_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, at least this."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= least)
