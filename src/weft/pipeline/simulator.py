"""Simulate a schedule: when each action runs, given what actions cost. Event-driven; no torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import get_args

from weft.core import Action, ActionCosts, ConfigError, Kind, Schedule

from .timeline import Lane, Timeline
from .validate import find_faults
from .weight_versions import versions_used

KINDS = get_args(Kind)
Row = tuple[
    int, float, list[tuple[int, float]]
]  # where its microbatches begin in `ends`; seconds; (such a place, lag)


def simulate(schedule: Schedule, costs: ActionCosts | None = None) -> Timeline:
    """Run a schedule on given costs. Each rank begins its next action once it is free and
    everything that the action needs has arrived.

    An action needs other actions of its own microbatch, in its own or neighbouring stages
    (`Schedule.needs`). Time and memory are linear in the number of actions. Raises ConfigError if
    the costs do not fit the schedule, and if the schedule cannot run to its end, with the text of
    `find_faults`.
    """
    costs = costs or ActionCosts()
    stages, microbatches = schedule.stages, schedule.microbatches
    found, apart = cost_rows(schedule, costs), split_backwards(schedule)

    ends = array("d", [-1.0]) * (
        len(KINDS) * stages * microbatches
    )  # of each row, one per microbatch
    starts = tuple(array("d") for _ in schedule.order)
    stops = tuple(array("d") for _ in schedule.order)
    waiting: dict[int, list[int]] = {}  # place in `ends` -> ranks that wait for it
    going = list(range(schedule.ranks))
    while going:
        rank = going.pop()
        order, start_s, stop_s = schedule.order[rank], starts[rank], stops[rank]
        free = stop_s[-1] if stop_s else 0.0
        for position in range(len(stop_s), len(order)):
            kind, stage, microbatch = order[position]
            part = kind == "B" and (stage, microbatch) in apart
            place, seconds, needs = found["b" if part else kind][stage]
            start = free
            for need, lag in needs:
                end = ends[need + microbatch]
                if end < 0:
                    break
                if end + lag > start:
                    start = end + lag
            else:
                free = start + seconds
                start_s.append(start)
                stop_s.append(free)
                ends[place + microbatch] = free
                if waiting:
                    going += waiting.pop(place + microbatch, ())
                continue
            waiting.setdefault(need + microbatch, []).append(rank)
            break
    if any(len(stop_s) < len(order) for stop_s, order in zip(stops, schedule.order)):
        raise ConfigError(
            "pipeline.schedule",
            schedule.name,
            "; ".join(find_faults(schedule)[:3]),
            "correct its order",
        )
    lanes = tuple(Lane(*columns) for columns in zip(schedule.order, starts, stops))
    used = versions_used(schedule) if schedule.versions else {}
    return Timeline(lanes, costs.each("activation_bytes", stages), costs.freed_by_b, used)


def split_backwards(schedule: Schedule) -> set[tuple[int, int]]:
    """The (stage, microbatch) of each backward that has a W of its own."""
    if not schedule.split:
        return set()
    return {(a.stage, a.microbatch) for order in schedule.order for a in order if a.kind == "W"}


def cost_rows(schedule: Schedule, costs: ActionCosts) -> dict[str, list[Row]]:
    """Kind of action -> stage -> what all its microbatches have in common. "b" is a B whose W comes
    later."""
    placement, microbatches = schedule.placement, schedule.microbatches
    forward, backward, weight, update = (
        costs.each(field, schedule.stages)
        for field in ("forward_s", "backward_s", "weight_s", "update_s")
    )
    comm = costs.each("comm_s", schedule.stages - 1)
    whole = tuple(b + w for b, w in zip(backward, weight))

    def place(kind: Kind, stage: int) -> int:
        return (KINDS.index(kind) * schedule.stages + stage) * microbatches

    def row(kind: Kind, stage: int, seconds: float) -> Row:
        needs = [
            (
                place(a.kind, a.stage),
                0.0 if placement[a.stage] == placement[stage] else comm[min(a.stage, stage)],
            )
            for a in schedule.needs(Action(kind, stage, 0))
        ]
        return place(kind, stage), seconds, needs

    taken: dict[str, tuple[Kind, Sequence[float]]] = {
        "F": ("F", forward),
        "B": ("B", whole),
        "b": ("B", backward),
        "W": ("W", weight),
        "U": ("U", update),
    }
    return {
        key: [row(kind, s, t) for s, t in enumerate(seconds)]
        for key, (kind, seconds) in taken.items()
    }
