"""Lets only the hosts of a run connect to gloo's ports.

gloo authenticates nobody. A connection that sends the number of a rank is that rank's, whoever
opened it; and a process whose file descriptors strangers use up is aborted.
So the kernel drops what other hosts send: each listening socket of gloo has a filter by the address
of the sender (socket(7), SO_ATTACH_FILTER), for which no right is needed. Linux, IPv4.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import sys
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta
from ipaddress import IPv4Network

import torch.distributed as dist

from weft._torch.gloo import guard_gloo

from .gate import is_loopback
from .log import log_line
from .rendezvous import address_of, source_towards

PREFIX = "weft/hosts"
PATIENCE = timedelta(minutes=30)  # torch's own for a group of gloo; a watchdog ends it sooner
MOST = 256  # addresses of a filter: of more hosts it lets the networks through that they are in
SO_ATTACH_FILTER = 26  # asm-generic/socket.h
# linux/bpf_common.h, linux/filter.h
LOAD_WORD, AND, JUMP_IF_EQUAL, RETURN = 0x20, 0x54, 0x15, 0x06
SENDER = 0xFFF00000 + 12  # SKF_NET_OFF, and there the source of an IPv4 header
ALL, NOTHING = 0xFFFFFFFF, 0  # bytes of the packet to keep


def admit_hosts(store: dist.Store, rank: int, world: int) -> None:
    """From now on only the hosts of these ranks reach the ports that gloo opens in this process.
    All of them call it. Where that cannot be had, a line says so.

    Args:
        store: where the ranks meet.
        rank: this rank.
        world: how many ranks there are.
    """
    own = _gloo_addresses()
    told = _told_by_all(store, "listens", rank, world, own)
    hosts = {address for each in told for address in each}
    sources = set()
    for address in hosts:
        with suppress(OSError):  # there is no way, as gloo will say
            sources.add(source_towards(address))
    for each in _told_by_all(store, "sends", rank, world, sorted(sources)):
        hosts |= set(each)
    if all(map(is_loopback, own)) and own:
        return
    problem = "the address of one host is not known" if not all(told) else _cannot_filter()
    if problem:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            log_line(f"everybody on the network can reach gloo's ports: {problem}")
        return
    guard_gloo(lambda listener: attach_filter(listener, hosts))


def attach_filter(listener: socket.socket, addresses: Collection[str]) -> None:
    """Drop what a TCP socket over IPv4 gets from elsewhere than these addresses, before it is seen.
    Connections that it accepts keep the filter. Raises OSError."""
    program = b"".join(struct.pack("HBBI", *line) for line in _program(addresses))
    lines = ctypes.create_string_buffer(program)
    where = struct.pack("HP", len(program) // 8, ctypes.addressof(lines))  # struct sock_fprog
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, where)


def _program(addresses: Collection[str]) -> list[tuple[int, int, int, int]]:
    """Of the kernel's classic packet filter: (operation, lines to skip if so, if not, value)."""
    networks: set[IPv4Network] = set()
    for prefix in range(32, -1, -1):
        networks = {IPv4Network((address, prefix), strict=False) for address in addresses}
        if len(networks) <= MOST:
            break
    lines = [(LOAD_WORD, 0, 0, SENDER), (AND, 0, 0, int(next(iter(networks)).netmask))]
    for network in networks:
        lines += [(JUMP_IF_EQUAL, 0, 1, int(network.network_address)), (RETURN, 0, 0, ALL)]
    return [*lines, (RETURN, 0, 0, NOTHING)]


def _gloo_addresses() -> list[str]:
    """At which gloo listens; none where that cannot be told."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    found = [address_of(name) for name in names.split(",") if name]
    return [address for address in found if address] if all(found) else []


def _cannot_filter() -> str:
    """Why this system filters no connections; empty if it does."""
    if sys.platform != "linux":
        return "only Linux filters connections for a process"
    try:
        with socket.socket() as probe:
            attach_filter(probe, ["127.0.0.1"])
    except OSError as error:
        return f"this kernel filters no connections for a process ({error.strerror})"
    return ""


def _told_by_all(
    store: dist.Store, what: str, rank: int, world: int, own: Collection[str]
) -> list[list[str]]:
    """What each rank tells, this one `own`."""
    keys = [f"{PREFIX}/{what}/{other}" for other in range(world)]
    store.set(keys[rank], json.dumps(list(own)))
    store.wait(keys, PATIENCE)
    return [json.loads(text) for text in store.multi_get(keys)]
