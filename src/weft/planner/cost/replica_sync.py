"""What a synchroniser sends, waits for and keeps in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .layout_batch import Array
from .network import Network, RankGroup

if TYPE_CHECKING:
    from weft.core import Sync


ROWS, SAMPLE = (
    2**10,
    2**20,
)  # of a bucket that a codec is asked about, as the matrix that some want; its elements
SETTLED = 10**9  # a step after which a codec that starts gently has come to its own


class SyncCost(NamedTuple):
    """Seconds of a step, as a mean over steps, and bytes that a rank sends."""

    seconds: Array
    sent_bytes: Array


def sync_cost(
    network: Network, group: RankGroup, elements: Array, item: float, sync: Sync | None
) -> SyncCost:
    """Of so many elements of `item` bytes on a rank. A period's exchange is spread over its steps.

    A codec says what it asks for of a bucket; that is taken times what a rank has.
    """
    n = group.size
    alone = n <= 1
    if sync is None or sync.plain:
        nbytes = elements * item
        return SyncCost(
            network.reduce_s(nbytes, group), np.where(alone, 0.0, 2 * (n - 1) / n * nbytes)
        )
    seconds, sent = np.zeros_like(n), np.zeros_like(n)
    for size in np.unique(n[~alone]):
        here = n == size
        for kind, share in _shares(sync, int(size), int(item)).items():
            took, given = _price_exchange(
                network, group, kind, elements * item * share, server_count(sync)
            )
            seconds, sent = seconds + np.where(here, took, 0.0), sent + np.where(here, given, 0.0)
    return SyncCost(seconds / sync.period, sent / sync.period)


def steps_independently(sync: Sync | None) -> bool:
    """Whether each replica steps by itself: what it waits for is no part of a backward."""
    return sync is not None and sync.independent


def server_count(sync: Sync | None) -> int:
    """Replicas that update parameters, each its own part, for all; 0: every replica updates all."""
    if sync is None or sync.plain:
        return 0
    return sync.servers


def wait_s(
    sync: Sync, exchange_s: Array, replicas: Array, rest_s: Array, update_s: Array
) -> tuple[Array, str, dict[str, Array | float]]:
    """Seconds that a replica which steps by itself waits in a step of which the rest takes
    `rest_s`, an update of `update_s` in it, the formula and what is in it. `exchange_s`: of
    exchanges, in the mean of a step. Replicas are equally fast, and what they wait for is as
    `weft.planner.cluster_sim.async_replicas` has it."""
    from weft.core import LocalSteps

    if isinstance(sync, LocalSteps):
        # a fragment has `delay` steps to arrive, and all of a period are sent one after the other
        share = np.full_like(rest_s, min(1.0, sync.fragments * sync.delay / sync.period))
        found = np.maximum(0.0, exchange_s - share * rest_s)
        return (
            found,
            "max(0, exchange_s - meanwhile x rest_s)",
            {"meanwhile": share, "rest_s": rest_s},
        )
    # a turn is of one replica at one server, of which it takes one at each; for half of it no other
    # is served
    turn = exchange_s / np.maximum(1, replicas - 1)
    found = np.maximum(sync.servers * turn, replicas * (turn / 2 + update_s) - rest_s)
    text = (
        "max(servers x turn, replicas x (turn / 2 + update_s) - rest_s), turn = exchange_s / max(1,"
        " replicas - 1)"
    )
    values = {"servers": float(sync.servers), "turn": turn, "replicas": replicas, "rest_s": rest_s}
    return found, text, {**values, "update_s": update_s}


def kept_bytes(sync: Sync | None, item: float, replicas: Array) -> tuple[Array, float]:
    """Bytes that a rank keeps for each element that it trains, which has `item` bytes, beside
    weight, gradient and optimizer state: where there are replicas, the most of any of them; and
    what a codec of fsdp's sums keeps of it, where replicas do not step by themselves."""
    if sync is None or sync.plain:
        return np.zeros_like(replicas), 0.0
    import torch

    from weft.core import AsyncServers, LocalSteps

    like = torch.zeros(SAMPLE, dtype=torch.float64 if item == 8 else torch.float32)
    state = sync.codec.state([(ROWS, SAMPLE // ROWS)], like)
    own = (
        sum(value.numel() * value.itemsize for value in state.values() if value.numel() > 1)
        / SAMPLE
    )
    match sync:
        # the weights last agreed on, those sent, the mean; and the state before, to send again
        case LocalSteps():
            found, own = np.full(len(replicas), (3 + bool(sync.momentum)) * item + 2 * own), 0.0
        # weights that come; gradients that go; the servers' own, and what each replica sends and
        # gets
        case AsyncServers():
            found = item + own + (2 * item + replicas * (2 * item + own)) / sync.servers
            own = 0.0
        case _:
            found = np.full(len(replicas), own)
    return np.where(replicas > 1, found, 0.0), own


def _shares(sync: Sync, size: int, item: int) -> dict[str, float]:
    """Kind of exchange -> bytes of a rank's messages, over those of the plain tensor; what goes to
    owners apart."""
    found: dict[str, float] = {}
    asks = sync.codec.asks([(ROWS, SAMPLE // ROWS)], sync.replica_view(size), item, SETTLED)
    if sync.updates_on_servers:
        # what is not yet the last goes back as it came, and then the weights, which no codec makes
        # small
        return {"owners": 1 + sum(a.nbytes * (1 if a.final else 2) for a in asks) / (SAMPLE * item)}
    for asked in asks:
        found[asked.kind] = found.get(asked.kind, 0.0) + asked.nbytes / (SAMPLE * item)
    return found


def _price_exchange(
    network: Network, group: RankGroup, kind: str, nbytes: Array, owners: int
) -> tuple[Array, Array]:
    """`nbytes` is what a rank gives: of "gather" its message, of "scatter" one for each rank; to
    owners and from them together."""
    n = group.size
    if kind == "sum":
        return network.reduce_s(nbytes, group), 2 * (n - 1) / n * nbytes
    if kind in ("gather", "sum_scatter"):
        collective = "all_gather" if kind == "gather" else "reduce_scatter"
        return network.gather_s(nbytes * n, group, collective), (n - 1) * nbytes
    if kind == "scatter":
        return network.exchange_s(nbytes * n, group), (n - 1) * nbytes
    # to owners and back: a server's link carries what all others send to it, and what they get; a
    # rank in the mean
    share = (n - 1) * nbytes / max(1, owners)
    return 2 * network.hops(group) + share / network.bandwidth(group), (n - 1) / n * nbytes
