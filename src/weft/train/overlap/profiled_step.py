"""A step of a profile: when each rank computed, and which communication was under way meanwhile.

Communication is overlapped while the rank computes, and exposed while it does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from weft.core import ConfigError, read_file

# Categories of events that weft adds to those of torch.profiler, and how a step is named.
STAGES, COMPUTES, TRACK, STEP = "stages", "computes", "communication", "step "

Event = dict[str, Any]
Interval = tuple[float, float]  # from when to when, in seconds


@dataclass(frozen=True)
class ProfiledRank:
    """What one rank did in a step. `actions`: (kind, from, to), as in ("F", 0.0, 0.5). `comms`:
    what communicates, as "all_reduce over dp" -> from when to when, in the order of starts."""

    actions: tuple[tuple[str, float, float], ...]
    computing: tuple[Interval, ...]
    comms: dict[str, tuple[Interval, ...]]

    def comm_s(self, *labels: str) -> float:
        """Seconds in which some of this communication is under way."""
        return total_s(self._under_way(labels))

    def overlapped_s(self, *labels: str) -> float:
        """Seconds in which it is, and the rank computes."""
        return total_s(overlap(self._under_way(labels), self.computing))

    def _under_way(self, labels: Iterable[str]) -> tuple[Interval, ...]:
        return union(span for label in labels for span in self.comms.get(label, ()))

    @cached_property
    def pieces(self) -> tuple[tuple[str, float, float], ...]:
        """Computing, cut where actions begin and end: (kind of action, from, to); the kind is ""
        outside of actions."""
        cuts = sorted({edge for _, *ends in self.actions for edge in ends})
        found = []
        for start, stop in self.computing:
            edges = [start, *(cut for cut in cuts if start < cut < stop), stop]
            for a, b in pairwise(edges):
                middle = (a + b) / 2
                kind = next((k for k, begin, end in self.actions if begin <= middle < end), "")
                found.append((kind, a, b))
        return tuple(found)


@dataclass(frozen=True)
class ProfiledStep:
    """A step, which begins at 0 s."""

    number: int
    ranks: tuple[ProfiledRank, ...]
    stop_s: float

    def figures(self) -> dict[str, Any]:
        """For JSON: of each rank and kind of communication how often, how long, and how much of it
        beside computing."""
        ranks = [
            {
                label: {
                    "count": len(spans),
                    "seconds": rank.comm_s(label),
                    "overlapped_s": rank.overlapped_s(label),
                }
                for label, spans in rank.comms.items()
            }
            for rank in self.ranks
        ]
        return {"step": self.number, "seconds": self.stop_s, "ranks": ranks}


def read_profile(path: Path) -> ProfiledStep:
    """The last step of a profile that a run with `train.profile` wrote. Raises ConfigError."""
    return last_step(own_tracks(path))


def own_tracks(path: Path) -> list[Event]:
    """The events of a profile that weft added to those of torch.profiler. Raises ConfigError."""
    fix = "name the profile.json of a run with train.profile"
    try:
        events = json.loads(read_file(path))["traceEvents"]
        found = [
            event
            for event in events
            if event.get("cat") in (STAGES, COMPUTES, TRACK)
            or (event["ph"] == "X" and event["name"].startswith(STEP))
            or (event["ph"] == "M" and event.get("tid") in (None, STAGES, COMPUTES))
        ]
        last_step(found)
    except OSError as error:
        raise ConfigError("--profile", str(path), f"cannot be read ({error})", fix) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"is not a profile of a run ({type(error).__name__}: {error})"
        raise ConfigError("--profile", str(path), problem, fix) from None
    return found


def tracks_json(events: Iterable[Event]) -> str:
    """A trace of these events alone, times in whole microseconds."""
    rounded = [
        event | {key: round(event[key]) for key in ("ts", "dur") if key in event}
        for event in events
    ]
    lines = ",\n".join(json.dumps(event) for event in rounded)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


def last_step(events: list[Event]) -> ProfiledStep:
    """The last step. Raises ValueError, KeyError or TypeError for what is no profile."""
    steps = [e for e in events if e["ph"] == "X" and str(e["name"]).startswith(STEP)]
    if not any(event.get("cat") == COMPUTES for event in events) or not steps:
        raise ValueError("has no steps in which a rank computes")
    number = max(int(event["name"].removeprefix(STEP)) for event in steps)
    spans = [e for e in steps if e["name"] == f"{STEP}{number}"]
    zero = min(float(event["ts"]) for event in spans)
    stop = max(float(event["ts"]) + event["dur"] for event in spans)
    ranks = sorted({int(event["pid"]) for event in spans})
    found = []
    for rank in ranks:
        own = [event for event in events if event.get("pid") == rank]
        found.append(_rank_of(own, zero, stop))
    return ProfiledStep(number, tuple(found), (stop - zero) / 1e6)


def _rank_of(events: list[Event], zero: float, stop: float) -> ProfiledRank:
    def within(spans: Iterable[Interval]) -> tuple[Interval, ...]:
        cut = ((max(a, zero), min(b, stop)) for a, b in spans)
        return tuple(((a - zero) / 1e6, (b - zero) / 1e6) for a, b in cut if a < b)

    def spans_of(track: str) -> Iterator[tuple[Event, Interval]]:
        for event in events:
            if event.get("cat") == track and event["ph"] == "X":
                yield event, (float(event["ts"]), float(event["ts"]) + event["dur"])

    actions = []
    for event, span in spans_of(STAGES):
        if event["name"] != "recv-wait":
            actions += [(str(event["args"]["kind"]), *cut) for cut in within([span])]
    comms: dict[str, list[Interval]] = {}
    begun: dict[str, float] = {}
    for event in events:
        if event.get("cat") != TRACK:
            continue
        if event["ph"] == "b":
            begun[event["id"]] = float(event["ts"])
        else:
            span = begun.pop(event["id"]), float(event["ts"])
            comms.setdefault(str(event["name"]), []).append(span)
    kept = {label: within(sorted(spans)) for label, spans in sorted(comms.items())}
    computing = union(within(span for _, span in spans_of(COMPUTES)))
    return ProfiledRank(tuple(actions), computing, {k: v for k, v in kept.items() if v})


def union(spans: Iterable[Interval]) -> tuple[Interval, ...]:
    """The same times without repetition, in order."""
    found: list[Interval] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def overlap(one: Iterable[Interval], other: Iterable[Interval]) -> tuple[Interval, ...]:
    """The times that are in both. Each has no repetition."""
    theirs = tuple(other)
    both = ((max(a, c), min(b, d)) for a, b in one for c, d in theirs)
    return tuple((start, stop) for start, stop in both if start < stop)


def total_s(spans: Iterable[Interval]) -> float:
    """The sum of the lengths."""
    return sum(stop - start for start, stop in spans)
