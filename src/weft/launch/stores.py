"""Stores at which the processes of a run meet. Torch's own listen on every interface."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from .gate import LOOPBACK, Passage, TokenGate, listen
from .rendezvous import Rendezvous

PATIENCE = timedelta(seconds=300)  # torch's own


def keep_store(
    address: str = LOOPBACK, port: int = 0, timeout: timedelta = PATIENCE
) -> dist.TCPStore:
    """A store of this process, at this address alone. Raises OSError if the port is taken."""
    server = listen(address, port)
    port = server.getsockname()[1]
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=server.detach(),
    )


def join_store(host: str, port: int, timeout: timedelta = PATIENCE) -> dist.TCPStore:
    """The store that another process keeps. Raises DistError if it does not answer in time."""
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def keep_for_hosts(
    meeting: Rendezvous,
    address: str,
    token: str,
    timeout: timedelta = PATIENCE,
    guests: int = 0,
) -> dist.TCPStore:
    """A store of this process, which hosts that know the token reach at this address of it.

    Args:
        meeting: where they meet.
        address: of this host.
        token: the run's.
        timeout: for each answer.
        guests: how many may come at once, beside strangers.

    Raises:
        OSError: the port is taken.
    """
    store = keep_store(timeout=timeout)
    TokenGate(address, meeting.port, token, store.port, guests)
    return store


def join_hosts_store(
    meeting: Rendezvous, address: str, token: str, timeout: timedelta = PATIENCE
) -> dist.TCPStore:
    """The store where hosts meet. Raises WeftError: nobody answers in time, or the token differs.

    Args:
        meeting: where they meet.
        address: of this host.
        token: the run's.
        timeout: for the store to be there, and for each answer of it.
    """
    way = Passage(address if meeting.here() else meeting.host, meeting.port, token)
    way.reach(timeout.total_seconds())
    return join_store(LOOPBACK, way.port, timeout)
