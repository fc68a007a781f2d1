"""What ran, how it ended, how fast, and whether it was verified: the first thing that is read."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any

from .. import blocks
from ..read_run import RunRecord, as_number, points, tables
from ..texts import Value, number, text
from .settings import flatten

Row = tuple[Value, Value, str]
# of a run file, what does not change the numbers that are compared
SAME_NUMBERS = ("output", "layout.axes", "train.steps", "train.log_every", "checkpoint.", "folder")
RATES = ("tokens", "samples")


def outcome(runs: Sequence[RunRecord]) -> blocks.Section | None:
    """Tiles of one run; of several a table, with a column for each."""
    found = [rows(run) for run in runs]
    problems = [blocks.note(said, "warn") for run in runs for said in run.problems]
    if len(runs) == 1:
        shown = blocks.tiles(found[0])
    else:
        names = [name["t"] for each in found for name, _, _ in each]
        kept = {each: text(each) for each in dict.fromkeys(names)}
        cells = [{name["t"]: (value, tone) for name, value, tone in each} for each in found]
        lines = [[kept[key], *(each.get(key, (None, ""))[0] for each in cells)] for key in kept]
        shown = blocks.table([None, *(run.name for run in runs)], lines)
    return blocks.section("summary", text("summary.title"), None, [shown, *problems])


def rows(run: RunRecord) -> list[Row]:
    """(name, value, tone); what is not known is left out."""
    status, tone = state(run)
    first: list[Row] = [(text("summary.state"), status, tone)]
    done, asked = steps_done(run), as_number(run.setting("train", "steps"))
    said, good = verified(run)
    rate, per_s, step_s = speed(run)
    predicted = as_number(run.prediction.get("step_s"))
    lost = run.happened("died")
    found: list[tuple[Value, Value]] = [
        (
            text("summary.steps"),
            text("of", part=number(done), whole=number(asked)) if asked else number(done),
        ),
        (text("summary.loss"), number(last(run, "loss"))),
        (text("summary.validation"), number(_validation(run))),
        (text(f"summary.{rate}_per_s"), number(per_s, "per_s")),
        (text("summary.step_s"), number(step_s, "s")),
        (text("summary.predicted_s"), number(predicted, "s")),
        (text("summary.memory"), number(peak_memory(run), "bytes")),
        (text("summary.time"), number(took_s(run), "s")),
    ]
    named = (*run.happened("resumed"), *run.happened("started"))
    headers: list[dict[str, Any]] = [
        each["rows"] for each in run.events if each in named and isinstance(each.get("rows"), dict)
    ]
    facts = headers[-1] if headers else {}
    model = run.setting("model", "build") or run.setting("model", "hf")
    written: list[tuple[Value, Any]] = [
        (text("summary.layout"), layout_text(run)),
        (text("summary.model"), facts.get("model") or model),
        (text("summary.device"), facts.get("device")),
    ]
    listed: list[Row] = [
        *first,
        (text("summary.verified"), said, good),
        *((name, value, "") for name, value in found if value is not None),
        *((name, str(value), "") for name, value in written if value),
    ]
    if lost:
        listed.append((text("summary.restarts"), number(len(lost)), "warn"))
    return listed


def state(run: RunRecord) -> tuple[Value, str]:
    """How the run ended, or that it has not, and its tone."""
    ends = ("finished", "stopped", "failed", "started", "resumed", "died")
    last_one = next((e["event"] for e in reversed(run.events) if e.get("event") in ends), None)
    if last_one in ("finished", "stopped", "failed"):
        tones = {"finished": "good", "stopped": "warn", "failed": "bad"}
        return text(f"state.{last_one}"), tones[last_one]
    asked = as_number(run.setting("train", "steps"))
    if last_one is None and asked and steps_done(run) >= asked:
        return text("state.finished"), "good"
    return text("state.unfinished"), "warn"


def verified(run: RunRecord) -> tuple[Value, str]:
    """Whether `weft verify` found this run's layout equal to one device, and its tone."""
    layout = layout_text(run)
    for found in tables(run.verified.get("layouts")):
        if found.get("layout") == layout:
            if found.get("passed") is True:
                if changed_settings(run):
                    return text("verified.other"), "warn"
                return text("verified.yes"), "good"
            return text("verified.no"), "bad"
    return text("verified.unknown"), ""


def changed_settings(run: RunRecord) -> list[str]:
    """Keys of the run file that differ from what was verified, and may change numbers."""
    then = run.verified.get("settings")
    if not isinstance(then, dict) or not run.settings:
        return []
    one, other = dict(flatten(then)), dict(flatten(run.settings))
    keys = sorted(one.keys() | other.keys())
    return [k for k in keys if one.get(k) != other.get(k) and not k.startswith(SAME_NUMBERS)]


def steps_done(run: RunRecord) -> int:
    return int(max((line["step"] for line in run.steps), default=0))


def last(run: RunRecord, key: str) -> float | None:
    """The last value of a metric."""
    return next((value for _, value in reversed([*points(run.steps, key)])), None)


def _validation(run: RunRecord) -> float | None:
    return next((value for _, value in reversed([*points(run.validations, "val_loss")])), None)


def speed(run: RunRecord) -> tuple[str, float | None, float | None]:
    """(what is counted, how many of it a second, seconds of a step): medians without the first
    line, which sets up."""
    unit = next((u for u in RATES if any(f"{u}_per_s" in line for line in run.steps)), RATES[0])
    return unit, _median(run, f"{unit}_per_s"), _median(run, "step_s")


def _median(run: RunRecord, key: str) -> float | None:
    values = [value for _, value in points(run.steps, key)]
    return median(values[1:] or values) if values else None


def peak_memory(run: RunRecord) -> float | None:
    return max((value for _, value in points(run.steps, "memory_bytes")), default=None)


def took_s(run: RunRecord) -> float | None:
    """Seconds from the first event to the last one."""
    times = [at for each in run.events if (at := as_number(each.get("time"))) is not None]
    return times[-1] - times[0] if len(times) > 1 else None


def layout_text(run: RunRecord) -> str:
    """The layout that the run has, or had at its end."""
    found = run.ranks.get("layout") or run.setting("layout", "axes")
    return found if isinstance(found, str) else ""


def clock(event: dict[str, Any]) -> str:
    """When an event was, in universal time."""
    at = as_number(event.get("time"))
    if at is None or not 0 <= at < 1e11:
        return ""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}"
