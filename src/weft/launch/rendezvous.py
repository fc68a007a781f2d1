"""Where the hosts of one run meet: how many, at which address, and how others reach this one. No
torch.

nodes("2:4")                       from 2 to 4 of them
Rendezvous.parse("10.0.0.1:29400")    a port of one host; or file:///shared/run1, which all see
"""

from __future__ import annotations

import os
import re
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from weft.core import ConfigError

PORT = 29400  # where none is said: torchrun's own


def parse_nodes(text: str) -> tuple[int, int]:
    """Least and most hosts of `4` or `2:4`. Raises ConfigError."""
    match = re.fullmatch(r"([1-9]\d{0,5})(?::([1-9]\d{0,5}))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise ConfigError(
            "--nodes",
            text,
            "is not a number of hosts",
            "write 4, or 2:4 for any number from 2 to 4",
        )
    return least, most


@dataclass(frozen=True)
class Rendezvous:
    """Where hosts meet: at a port of one of them, or in a file that all of them see."""

    host: str = ""
    port: int = 0
    file: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """`host:port`, `tcp://host:port`, `file:///path`, or `env://`: what MASTER_ADDR and
        MASTER_PORT say. Raises ConfigError."""
        fix = "write host:port, tcp://host:port, file:///path or env://"
        if text == "env://":
            host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", str(PORT))
            if not host or not port.isdigit():
                raise ConfigError(
                    "--rdzv", text, "MASTER_ADDR is not set, or MASTER_PORT is not a number", fix
                )
            return cls(host, int(port))
        scheme, _, rest = text.rpartition("://")
        if scheme == "file":
            if not rest.startswith("/") or not Path(rest).parent.is_dir():
                raise ConfigError(
                    "--rdzv",
                    text,
                    "is not a file in a folder that exists",
                    "write file:///folder/name",
                )
            return cls(file=rest)
        match = re.fullmatch(r"(\[[0-9a-fA-F:.%]+\]|[^:/\s\[\]]+)(?::(\d{1,5}))?", rest)
        if scheme not in ("", "tcp") or match is None or not 0 < int(match[2] or PORT) < 1 << 16:
            raise ConfigError("--rdzv", text, "does not say where hosts meet", fix)
        return cls(match[1].strip("[]"), int(match[2] or PORT))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"file://{self.file}" if self.file else f"{host}:{self.port}"

    def address(self) -> str:
        """The address by which the other hosts reach this one: that of its way to where they meet.
        Nothing is sent. Raises ConfigError if there is no way."""
        try:
            found = source_towards(self.host, self.port) if not self.file else "127.0.0.1"
        except OSError as error:
            problem = f"this host has no route to it ({error.strerror or error})"
            raise ConfigError(
                "--rdzv", str(self), problem, "name a host that this one reaches"
            ) from None
        if (
            self.host != "localhost"
            and not re.match(r"[\d.]+$|.*:", self.host)
            and found.startswith("127.")
        ):
            with suppress(
                OSError
            ):  # its own name is often a loopback's; without a network that is all there is
                return source_towards("192.0.2.1")  # RFC 5737: any host but this one
        return found

    def here(self) -> bool:
        """Whether it is a port of this host: one of its addresses can be taken, whatever its name
        stands for."""
        if self.file:
            return False
        family, kind, _, _, where = socket.getaddrinfo(self.host, 0, type=socket.SOCK_DGRAM)[0]
        try:
            with socket.socket(family, kind) as probe:
                probe.bind(where)
        except OSError:
            return False
        return True


def source_towards(host: str, port: int = 9) -> str:
    """The address from which this host would send there; nothing is sent. Raises OSError: there is
    no way."""
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return probe.getsockname()[0]


def listen_at(address: str) -> None:
    """Let gloo and NCCL listen on the interface of this address alone, if that can be told
    and the environment names no other. They take what the host's name stands for, or any."""
    name = interface_of(address)
    for variable, exact in (("GLOO", ""), ("NCCL", "=")):
        if name is not None:
            os.environ.setdefault(f"{variable}_SOCKET_IFNAME", f"{exact}{name}")


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address; None where that cannot be told. On macOS
    that is told of the loopback alone."""
    if sys.platform == "darwin" and address.startswith("127."):
        return "lo0"
    if sys.platform != "linux" or ":" in address:
        return None
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if address_of(name) == address), None)


def address_of(interface: str) -> str | None:
    """The IPv4 address of this network interface; None where it has none, or that cannot be
    told."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(
                probe, 0x8915, struct.pack("256s", interface[:15].encode())
            )  # SIOCGIFADDR
        except OSError:  # it has none
            return None
    return socket.inet_ntoa(answer[20:24])
