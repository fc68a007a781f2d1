"""A network of its own for a run on this host, whose one link can be taken down, and connections of
it that can be cut. Takes root."""

from __future__ import annotations

import ctypes
import os
import random
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

NAME = f"weft-faults-{os.getpid()}"
INSIDE = ("ip", "netns", "exec", NAME)  # before a command
PIDFD_OPEN, PIDFD_GETFD = 434, 438  # system calls, the same on every machine


@contextmanager
def namespace() -> Iterator[None]:
    """It is there."""
    subprocess.run(["ip", "netns", "add", NAME], check=True)
    try:
        _link("up")
        yield
    finally:
        subprocess.run(["ip", "netns", "del", NAME], check=True)


@contextmanager
def link_down() -> Iterator[None]:
    """Nothing arrives, and nobody is told."""
    _link("down")
    try:
        yield
    finally:
        _link("up")


def cut_connection(process: int, dice: random.Random) -> None:
    """End one of the TCP connections of a process, as a middlebox does. Raises IndexError if it has
    none, OSError if it is gone."""
    folder = f"/proc/{process}/fd"
    numbers = [
        int(number)
        for number in os.listdir(folder)
        if os.readlink(f"{folder}/{number}").startswith("socket:")
    ]
    handle = _call(PIDFD_OPEN, process, 0)
    found: list[socket.socket] = []
    try:
        for number in numbers:
            one = socket.socket(fileno=_call(PIDFD_GETFD, handle, number, 0))
            found.append(one)
        dice.choice([one for one in found if _connected(one)]).shutdown(socket.SHUT_RDWR)
    finally:
        os.close(handle)
        for one in found:
            one.close()


def _connected(one: socket.socket) -> bool:
    try:
        return one.family == socket.AF_INET and bool(one.getpeername())
    except OSError:  # it listens
        return False


def _link(state: str) -> None:
    subprocess.run([*INSIDE, "ip", "link", "set", "lo", state], check=True)


def _call(number: int, *arguments: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
