"""Where gloo listens. Torch opens a port within the constructor of each process group, and tells it
to the other ranks there: what must happen in between has no other place than that constructor."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

TRIES = 20  # ports, if others connect to each before it is guarded
_MAKE: Callable[..., None] = dist.ProcessGroupGloo.__init__
_LOCK = threading.Lock()  # what two threads open at once could not be told apart
_UNTAKEN = slice(24, 28)  # of struct tcp_info: connections that wait to be accepted

Guard = Callable[[socket.socket], None]


def guard_gloo(guard: Guard) -> None:
    """Hand `guard` the listening socket of each gloo process group that this process makes from now
    on, before other ranks hear of it; whoever connects earlier gets into no group. Linux only, and
    where GLOO_SOCKET_IFNAME is set."""

    def make(
        self: Any,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta = dist.distributed_c10d.default_pg_timeout,
    ) -> None:
        names = os.environ["GLOO_SOCKET_IFNAME"].split(",")
        options = dist.ProcessGroupGloo._Options()
        options._devices = [_guarded_device(name, guard) for name in names]
        options._threads = 2 * len(names)  # as torch has it
        options._timeout = timeout
        _MAKE(self, store, rank, size, options)

    dist.ProcessGroupGloo.__init__ = make  # type: ignore[method-assign]


def _guarded_device(interface: str, guard: Guard) -> Any:
    for _ in range(TRIES):
        with _LOCK:
            before = _sockets()
            device = dist.ProcessGroupGloo.create_device(interface=interface)
            listeners = [each for each in _new_sockets(before) if _is_listening(each)]
            for listener in listeners:
                guard(listener)
            ports = [listener.getsockname()[1] for listener in listeners]
            early = any(_waits(listener) for listener in listeners) or any(
                not _is_listening(each) and each.getsockname()[1] in ports
                for each in _new_sockets(before)
            )
        if not listeners:
            raise RuntimeError(f"gloo opened no port on {interface}")
        if not early:
            return device
    raise RuntimeError(f"others connected to each of {TRIES} ports that gloo opened")


def _sockets() -> dict[str, int]:
    """Identity -> file descriptor, of the sockets of this process."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it is closed by now
            name = os.readlink(entry)
            if name.startswith("socket:"):
                found[name] = int(entry.name)
    return found


def _new_sockets(before: dict[str, int]) -> list[socket.socket]:
    """Those over IPv4 or IPv6 that this process has opened since. Closing them closes copies."""
    found = []
    for name, number in _sockets().items():
        if name not in before:
            with suppress(OSError):
                each = socket.socket(fileno=os.dup(number))
                if each.family in (socket.AF_INET, socket.AF_INET6):
                    found.append(each)
    return found


def _is_listening(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _waits(listener: socket.socket) -> bool:
    """Whether a connection to it has not been accepted yet."""
    told = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNTAKEN.stop)
    return any(told[_UNTAKEN])
