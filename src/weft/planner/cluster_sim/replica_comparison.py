"""Compares synchronisers on replicas that are not equally fast, beside the synchronous one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.core import (
    REPLICA_AXIS,
    Sync,
)

from ..cost.breakdown import TimePart
from ..cost.layout_batch import Array
from . import async_replicas, wait_groups
from .scenario import Scenario
from .stragglers import PacedScenario

TURNS, TOGETHER = (
    200_000,
    4_000_000,
)  # steps of single replicas, simulated one by one, and all at once
LEAST, MOST = 25, 400  # steps


@dataclass(frozen=True)
class ReplicaComparison:
    """Seconds of a step on average, `planned` where all devices are equal, `met` with slow and
    varying ones and slow links."""

    name: str
    planned_s: float
    met_s: float


def compare_syncs(
    setup: Scenario,
    syncs: Mapping[str, Sync],
    slow: Mapping[int, float],
    links: Mapping[str, float],
    jitter: float,
    seed: int,
) -> list[ReplicaComparison]:
    """Each of these ways, under its name."""
    rng, found = np.random.default_rng(seed), []
    cases = []
    for factors, varies, on in (({}, 0.0, {}), (slow, jitter, links)):
        paced = PacedScenario(setup, tuple(factors.values()), varies, on)
        drawn = paced.draw(factors, rng)
        cases.append((paced, drawn, on))
    whole_s = setup.step().after.get(TimePart.OPTIMIZER, 0.0)
    known = [
        *(wait_groups.device_coords(setup.choices, device)[REPLICA_AXIS] for device in slow),
        *([0] if links else []),
    ]
    for name, sync in syncs.items():
        own_way, served = replace(setup, sync=sync), sync.asynchronous
        step, seconds = own_way.step(), []
        update_s = step.after.get(TimePart.OPTIMIZER, 0.0)
        updates = 0.0 if served or not update_s else update_s / whole_s  # of a replica itself
        for paced, drawn, on in cases:
            exchange_s = _exchange_s(own_way, paced.points, drawn, on)
            own_s = paced.alone_s(drawn, updates) + step.summed_s
            seconds.append(
                _step_s(sync, own_s, exchange_s, update_s if served else 0.0, known, rng)
            )
        found.append(ReplicaComparison(name, *seconds))
    return found


def _step_s(
    sync: Sync,
    own: Array,
    exchange_s: Array,
    update_s: float,
    known: Sequence[int],
    rng: np.random.Generator,
) -> float:
    """`own`: [draws, replicas] seconds of a step by itself; `update_s`: of servers, for each;
    `known`: replicas that are not like others."""
    replicas, single = own.shape[1], sync.asynchronous
    steps = int(np.clip((TURNS if single else TOGETHER) // replicas, LEAST, MOST))
    if sync.independent and not single:
        steps = sync.period * max(4, steps // sync.period)
    elif (
        single and steps * replicas > TURNS
    ):  # some stand for all, and take as long at the servers as these
        some = np.unique(
            [*known, *np.linspace(0, replicas - 1, TURNS // steps - len(known), dtype=int)]
        )
        base = exchange_s.min()  # a longer turn is one's own
        more = replicas / len(some)
        own, exchange_s, update_s = (
            own[:, some],
            exchange_s[some] - base + base * more,
            update_s * more,
        )
    mixed = np.take_along_axis(own, rng.integers(len(own), size=(steps, own.shape[1])), axis=0)
    return async_replicas.long_run_step_s(
        sync, async_replicas.step_ends(sync, mixed, exchange_s, update_s)
    )


def _exchange_s(
    setup: Scenario, points: Sequence[float], drawn: Array, links: Mapping[str, float]
) -> Array:
    """What `agree.ends` adds for an exchange: what backward does not hide of it; all; or each
    replica's turn, of which the first's goes over the slow link."""
    sync = setup.sync
    if sync is not None and sync.asynchronous:
        turns = np.full(setup.size(REPLICA_AXIS), setup.step().exchange_s)
        turns[0] = setup.step(links=links).exchange_s
        return turns / max(1, len(turns) - 1)
    if sync is not None and sync.independent:
        return np.array(setup.step(links=links).exchange_s)
    exposed = [setup.step(pace, links).after.get(TimePart.GRADIENTS, 0.0) for pace in points]
    return np.interp(drawn.max(axis=1), points, exposed).mean()
