"""How far the clocks of the hosts differ, measured by round trips as in NTP (Mills 1985)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from .findings import Finding
from .host_rendezvous import HostGroup

ROUNDS = 8
NOTE_S, WRONG_S = 0.05, 1.0

Trip = tuple[float, float, float]  # sent by this clock, answered by the other, received by this


def clocks(circle: HostGroup, clock: Callable[[], float] = time.time) -> Finding:
    """Every host's clock beside that of host 0, as all of them see it. `clock`: seconds."""
    own = (0.0, 0.0)
    if circle.number == 0:
        for number in circle.members:
            for trip in range(ROUNDS) if number else ():
                circle.ask(f"ping-{trip}", number)
                circle.tell(f"pong-{number}-{trip}", clock())
    else:
        trips = []
        for trip in range(ROUNDS):
            sent = clock()
            circle.tell(f"ping-{trip}", sent)
            answered = circle.ask(f"pong-{circle.number}-{trip}", 0)
            trips.append((sent, answered, clock()))
        own = offset(trips)
    told = circle.share("clock", own)
    return clocks_finding(
        {circle.name(number): (each[0], each[1]) for number, each in told.items()}
    )


def offset(trips: Sequence[Trip]) -> tuple[float, float]:
    """By how many seconds this clock is ahead of the other, and how sure that is: the fastest trip
    tells most."""
    sent, answered, received = min(trips, key=lambda trip: trip[2] - trip[0])
    return (sent + received) / 2 - answered, (received - sent) / 2


def clocks_finding(offsets: Mapping[str, tuple[float, float]]) -> Finding:
    """Seconds of each host's clock ahead of host 0's, and their uncertainty. What may be the
    measurement's counts as none."""
    sure = {name: max(0.0, abs(ahead) - unsure) for name, (ahead, unsure) in offsets.items()}
    name = max(sure, key=lambda each: abs(offsets[each][0]))
    ahead, unsure = offsets[name]
    facts = {
        "offset_s": {each: ahead for each, (ahead, _) in offsets.items()},
        "uncertainty_s": {each: unsure for each, (_, unsure) in offsets.items()},
    }
    first = next(iter(offsets))
    found = (
        f"that of {name} is {abs(ahead):.2g} s {'ahead of' if ahead > 0 else 'behind'} {first}'s,"
        f" +- {unsure:.1g} s"
    )
    if len(offsets) < 2 or max(sure.values()) < NOTE_S:
        bound = max(abs(ahead) + unsure for ahead, unsure in offsets.values())
        return Finding("clocks", "ok", f"equal within {bound:.1g} s", "", facts)
    far = [each for each in sure if sure[each] >= NOTE_S]
    advice = (
        "times of files and logs cannot be compared: start NTP (chrony, systemd-timesyncd) on"
        f" {', '.join(far)}"
    )
    return Finding(
        "clocks", "wrong" if max(sure.values()) >= WRONG_S else "note", found, advice, facts
    )
