"""Replicas: what each way to agree makes of replicas that are not equally fast, beside the synchronous one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..cost.choices import Array
from ..syncs import AnyTime, EachPeriod, Sync
from . import agree, grid
from .setup import Setup
from .stragglers import Paced, paces

TURNS = 200_000  # steps of single replicas that are simulated one by one
LEAST, MOST = 25, 400  # steps


@dataclass(frozen=True)
class Agreed:
    """Seconds of a step on average, `planned` where all devices are equal, `met` with the slow and varying ones."""

    name: str
    planned_s: float
    met_s: float


def table(setup: Setup, syncs: Mapping[str, Sync], slow: Mapping[int, float], jitter: float, seed: int) -> list[Agreed]:
    """Each of these ways, under its name."""
    rng, found = np.random.default_rng(seed), []
    even = [paces(setup, {})]
    met = [paces(setup, slow, jitter, rng) for _ in range(Paced(setup).draws() if jitter else 1)]
    known = [grid.place(setup.choices, device)["dp"] for device in slow]
    alone: list[Array] = []
    for name, sync in syncs.items():
        paced = Paced(replace(setup, sync=sync), tuple(slow.values()), jitter)
        alone = alone or [np.array([paced.alone_s(one) for one in drawn]) for drawn in (even, met)]
        seconds = [_step_s(paced, sync, own, drawn, known, rng) for own, drawn in zip(alone, (even, met))]
        found.append(Agreed(name, *seconds))
    return found


def _step_s(
    paced: Paced, sync: Sync, own: Array, drawn: Sequence[Array], known: Sequence[int], rng: np.random.Generator
) -> float:
    """`own`: [draws, replicas] seconds of a step by itself; `drawn`: what they were drawn from."""
    exchange_s, replicas, steps = _exchange_s(paced, drawn), own.shape[1], MOST
    if isinstance(sync, EachPeriod):
        steps = sync.period * max(4, MOST // sync.period)
    elif isinstance(sync, AnyTime):
        steps = max(LEAST, min(MOST, TURNS // replicas))
        if steps * replicas > TURNS:  # some stand for all, and take as long at the servers as these
            some = np.unique([*known, *np.linspace(0, replicas - 1, TURNS // steps - len(known), dtype=int)])
            own, exchange_s = own[:, some], exchange_s * replicas / len(some)
    mixed = np.take_along_axis(own, rng.integers(len(own), size=(steps, own.shape[1])), axis=0)
    return agree.step_s(sync, agree.ends(sync, mixed, exchange_s))


def _exchange_s(paced: Paced, drawn: Sequence[Array]) -> float:
    """What `agree.ends` adds for an exchange: what backward does not hide of it; all; or one replica's turn."""
    match paced.setup.sync:
        case EachPeriod():
            return paced.planned.exchange_s
        case AnyTime():
            return paced.planned.exchange_s / max(1, paced.setup.size("dp") - 1)
    return float(np.mean([paced.exposed_s(one) for one in drawn]))
