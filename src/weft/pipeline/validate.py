"""Check a schedule: every action exists once, on the right rank, in an order that can run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import get_args

from weft.core import Action, Kind, Schedule

from .weight_versions import versions_used

KINDS = get_args(Kind)
Place = tuple[int, int]  # rank, position in its order


def find_faults(schedule: Schedule) -> tuple[str, ...]:
    """Every fault of a schedule, one sentence each; empty if it is correct. Takes near-linear time
    in the number of actions."""
    faults = [
        f"stage {stage} lies on rank {rank}, and there are {schedule.ranks} ranks"
        for stage, rank in enumerate(schedule.placement)
        if not 0 <= rank < schedule.ranks
    ]
    where: dict[Action, Place] = {}
    for look in (_places, _missing, _backwards_in_time, _updates, _deadlock):
        faults += look(schedule, where)
    return tuple(faults or _versions(schedule, where))


def _places(schedule: Schedule, where: dict[Action, Place]) -> Iterator[str]:
    """Faults of unknown, duplicate and misplaced actions. Fills `where` with the valid ones."""
    for rank, actions in enumerate(schedule.order):
        for position, action in enumerate(actions):
            kind, stage, microbatch = action
            if kind not in KINDS:
                yield f"{action} on rank {rank}: {kind!r} is not a kind ({', '.join(KINDS)})"
            elif not 0 <= stage < schedule.stages:
                yield (
                    f"{action} on rank {rank}: there is no stage {stage}, only 0 to"
                    f" {schedule.stages - 1}"
                )
            elif microbatch < 0:
                yield f"{action} on rank {rank}: there is no microbatch {microbatch}"
            elif action in where:
                yield f"{action} on rank {rank} stands twice: rank {where[action][0]} has it before"
            else:
                where[action] = rank, position
                if (right := schedule.placement[stage]) != rank:
                    yield (
                        f"{action} on rank {rank} is misplaced: stage {stage} lies on rank {right}"
                    )


def _missing(schedule: Schedule, where: dict[Action, Place]) -> Iterator[str]:
    known = sorted({action.microbatch for action in where})
    gap = next((place for place, microbatch in enumerate(known) if place != microbatch), None)
    if gap is not None:  # a number may be any: what is missing is not counted up to it
        yield f"no action is of microbatch {gap}, and {known[-1]} is one"
    for stage, rank in enumerate(schedule.placement):
        for microbatch in known:
            for action in (Action("F", stage, microbatch), Action("B", stage, microbatch)):
                if action not in where:
                    yield f"{action} is missing on rank {rank}"


def _backwards_in_time(schedule: Schedule, where: dict[Action, Place]) -> Iterator[str]:
    """Faults of actions that come before what they need on the same rank."""
    for action, (rank, _) in where.items():
        if action.kind != "U":
            for need in schedule.needs(action):
                if _later(where, need, action):
                    yield f"{action} on rank {rank} stands before {need}, which it needs"


def _updates(schedule: Schedule, where: dict[Action, Place]) -> Iterator[str]:
    """Faults unless every gradient is in exactly one update, the same on all stages."""
    ends = sorted({a.microbatch for a in where if a.kind == "U"})
    if not schedule.versions:
        if ends:
            yield (
                f"updates after microbatches {ends}, but the schedule has no `versions`: a"
                " synchronous one has no U"
            )
        return
    if schedule.microbatches - 1 not in ends:
        ends.append(schedule.microbatches - 1)
    for stage, rank in enumerate(schedule.placement):
        before: Action | None = None
        for start, end in zip([0, *(end + 1 for end in ends)], ends):
            update = Action("U", stage, end)
            if update not in where:
                yield f"{update} is missing on rank {rank}"
                continue
            for microbatch in range(start, end + 1):
                gradient = Action("W", stage, microbatch)
                if gradient not in where:
                    gradient = Action("B", stage, microbatch)
                if _later(where, gradient, update):
                    yield (
                        f"{update} on rank {rank} stands before {gradient}, whose gradient it"
                        " applies"
                    )
                if before and _later(where, before, gradient):
                    yield (
                        f"{before} on rank {rank} stands after {gradient}, whose gradient is not"
                        " its own"
                    )
            before = update


def _versions(schedule: Schedule, where: dict[Action, Place]) -> Iterator[str]:
    """Faults of microbatches whose weight version the stage has not made yet. The schedule is
    otherwise correct."""
    newest = versions_used(replace(schedule, versions="stash"))
    for (stage, microbatch), version in versions_used(schedule).items():
        if version > newest[stage, microbatch]:
            forward = Action("F", stage, microbatch)
            yield (
                f"{forward} on rank {where[forward][0]} stands before version {version} of its"
                " weights is made"
            )


def _later(where: dict[Action, Place], action: Action, other: Action) -> bool:
    """Whether both are on one rank and `action` comes after `other`."""
    if action not in where or other not in where:
        return False
    (rank, position), (its_rank, its_position) = where[action], where[other]
    return rank == its_rank and position > its_position


def _deadlock(schedule: Schedule, where: dict[Action, Place]) -> Iterator[str]:
    """The ranks that wait for one another in a cycle, if the order cannot run to its end.

    Needs that are missing, or come later on the same rank, are other faults; here they count as
    done.
    """
    orders = [[a for a in actions if a in where] for actions in schedule.order]
    position = [0] * len(orders)
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}  # need -> ranks
    waits: dict[int, Action] = {}  # rank -> need
    going = list(range(len(orders)))
    while going:
        rank = going.pop()
        order = orders[rank]
        while position[rank] < len(order):
            action = order[position[rank]]
            need = next(
                (
                    n
                    for n in schedule.needs(action)
                    if n not in done and where.get(n, (rank,))[0] != rank
                ),
                None,
            )
            if need is not None:
                waits[rank] = need
                waiting.setdefault(need, []).append(rank)
                break
            done.add(action)
            going += waiting.pop(action, ())
            position[rank] += 1
        else:
            waits.pop(rank, None)
    if waits:
        circle = _circle({rank: where[need][0] for rank, need in waits.items()})
        yield "deadlock: " + ", ".join(
            f"rank {rank} waits at {orders[rank][position[rank]]} for {waits[rank]}"
            for rank in circle
        )


def _circle(after: Mapping[int, int]) -> list[int]:
    """A cycle of this map from each rank to one of the others, starting at its smallest rank."""
    rank = min(after)
    for _ in after:
        rank = after[rank]
    circle = [rank]
    while (rank := after[rank]) != circle[0]:
        circle.append(rank)
    first = circle.index(min(circle))
    return circle[first:] + circle[:first]
