"""A simulated step of one pipeline as a timeline, with what follows it."""

from __future__ import annotations

from array import array

from weft.pipeline import Lane, Timeline, simulate

from ..cost.breakdown import TimePart
from .scenario import Scenario, StepParts

SHORT: dict[str, str] = {  # part of an estimate -> what it is called in a picture
    TimePart.GRADIENTS: "reduce",
    TimePart.FSDP_REDUCE: "reduce",
    TimePart.FSDP_GATHER: "gather",
    TimePart.STRAGGLERS: "wait",
}


def pipeline_timeline(setup: Scenario, step: StepParts) -> Timeline:
    """The actions alone."""
    return simulate(setup.schedule, step.costs)


def step_timeline(acted: Timeline, step: StepParts) -> Timeline:
    """The actions, then each part that follows, on all ranks at once: every rank waits for the
    last."""
    spans, now = [], acted.makespan_s
    for name, seconds in step.after.items():
        spans.append((SHORT.get(name, name), now, now + seconds))
        now += seconds
    labels, starts, stops = zip(*spans) if spans else ((), (), ())
    lanes = tuple(
        Lane(
            (*lane.labels, *labels),
            array("d", [*lane.start_s, *starts]),
            array("d", [*lane.stop_s, *stops]),
        )
        for lane in acted.lanes
    )
    return Timeline(lanes, acted.activation_bytes, acted.freed_by_b, acted.versions)
