"""Simulates replicas whose steps take different times, and which of them wait for each other.
Synchronous, by periods, or at any time: the three kinds of `syncs`.

`own[k, r]`: seconds that replica r takes for its k-th step by itself. What is found, `ends[k, r]`,
is when it has done that step. Who is left out for a silence (`timeout_s`) is not simulated.
"""

from __future__ import annotations

import heapq

import numpy as np

from weft.core import AsyncServers, LocalSteps, Sync, SyncEveryStep

from ..cost.layout_batch import Array


def step_ends(
    sync: Sync, own: Array, exchange_s: Array | float = 0.0, update_s: float = 0.0
) -> Array:
    """When each replica ends each step. `exchange_s`: what an exchange of all gradients, or
    weights, adds: to each step; to each period, over all fragments; or of a push and a pull, when
    no other replica is at the servers, which may be another number for each replica. `update_s`:
    what servers do for each, beside `own`."""
    match sync:
        case SyncEveryStep():
            steps = np.cumsum(own.max(axis=1) + exchange_s)
            return np.broadcast_to(steps[:, None], own.shape)
        case LocalSteps():
            return _by_period(sync, own, float(exchange_s))
        case AsyncServers():
            return _any_time(sync, own, exchange_s, update_s)


def long_run_step_s(sync: Sync, found: Array) -> float:
    """Seconds of a step in the long run, from `ends`: over whole periods after the first; without
    periods over the second half of the time for which all take part, in which some may do more
    steps than others."""
    steps, replicas = found.shape
    if not sync.asynchronous:
        first = sync.period + sync.delay - 1
        last = first + (steps - 1 - first) // sync.period * sync.period
        return float((found[last] - found[first]).mean()) / (last - first)
    end = float(found[-1].min())
    numbers = np.arange(1, steps + 1)
    done = [np.diff(np.interp([end / 2, end], found[:, r], numbers))[0] for r in range(replicas)]
    return end / 2 / float(np.mean(done))


def _by_period(sync: LocalSteps, own: Array, exchange_s: float) -> Array:
    """A fragment is sent by all in the same step, and has arrived when the last has sent it, one
    exchange after the other; `delay` steps later nobody goes on before that."""
    found, now, arrived = np.empty_like(own), np.zeros(own.shape[1]), 0.0
    offsets = [
        turn * sync.period // sync.fragments % sync.period for turn in range(1, sync.fragments + 1)
    ]
    under_way: dict[int, float] = {}  # fragment -> when it has arrived
    for k, seconds in enumerate(own):
        now = now + seconds
        for fragment, offset in enumerate(offsets):
            since = (k + 1 - offset) % sync.period
            if since == 0:
                arrived = max(arrived, float(now.max())) + exchange_s / sync.fragments
                under_way[fragment] = arrived
            if since == sync.delay and fragment in under_way:
                now = np.maximum(now, under_way.pop(fragment))
        found[k] = now
    return found


def _any_time(sync: AsyncServers, own: Array, exchange_s: Array | float, update_s: float) -> Array:
    """Servers take replicas in the order in which they come, each for half of its exchange and an
    update, and read while they write. A replica has one link, over which it sends to one server
    after the other. Weights for its next step go to a replica that is at most `staleness` steps
    ahead of the slowest (stale synchronous parallel, Ho et al. 2013)."""
    steps, replicas = own.shape
    bound = steps if sync.staleness is None else sync.staleness
    takes: list[list[float]] = own.T.tolist()
    found: list[list[float]] = [[] for _ in takes]  # lists: one number at a time
    at = [replicas] + [0] * steps  # how many have done so many steps
    slowest, free, halves = 0, 0.0, np.broadcast_to(np.asarray(exchange_s) / 2, replicas).tolist()
    ahead: list[int] = []  # who waits for the slowest
    coming = [(times[0], r) for r, times in enumerate(takes)]
    heapq.heapify(coming)
    while coming:
        ready, r = heapq.heappop(coming)
        link_s = sync.servers * halves[r]
        free = max(free, ready) + halves[r] + update_s
        now = max(free, ready + link_s + update_s) + link_s
        done = found[r]
        at[len(done)] -= 1
        done.append(now)
        at[len(done)] += 1
        if not at[slowest]:
            slowest += 1
            going, ahead = [*ahead, r], []
        else:
            going = [r]
        for one in going:
            count = len(found[one])
            if count - slowest > bound:
                ahead.append(one)
            elif count < steps:
                heapq.heappush(coming, (max(now, found[one][-1]) + takes[one][count], one))
    return np.array(found).T
