"""Someone elsewhere on the network, who tries every port that he is told of.

    python -m tests.launch.stranger

Reads lines of JSON, addresses [[host, port], ...], and answers each with those that took a
connection. To these he sends noise, a request of HTTP and what torch's own clients of stores and of
RPC send; he passes for ranks of gloo, whose first word is a number of 8 bytes; and he keeps a
connection open that he says nothing on.
"""

from __future__ import annotations

import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

GARBAGE = (b"GET / HTTP/1.0\r\n\r\n", b"\0" * 1000, b"\xff" * 1000, bytes(range(256)) * 400)
RANKS = 4  # that he passes for
PATIENCE_S = 0.5  # where nothing answers
Address = tuple[str, int]


def use_as_a_store(address: Address) -> None:
    """What a client of torch's stores does, and before it calls, one of its RPC."""
    client: dist.TCPStore | None = None
    with suppress(RuntimeError):
        second = timedelta(seconds=1)
        client = dist.TCPStore(*address, None, False, timeout=second, wait_for_workers=False)
    if client is not None:  # what answers is a store
        for key in client.list_keys():
            client.set(key, "gone")


def send_garbage(address: Address) -> None:
    for noise in GARBAGE:
        with suppress(OSError), socket.create_connection(address, 1.0) as connection:
            connection.sendall(noise)


class Attack:
    """All that he does; connections stay open."""

    def __init__(self) -> None:
        self._held: dict[Address, list[socket.socket]] = {}

    def __call__(self, address: Address) -> bool:
        """Whether it took a connection."""
        try:
            if address not in self._held:
                self._hold(address)
            else:
                socket.create_connection(address, PATIENCE_S).close()
        except OSError:
            return False
        send_garbage(address)
        use_as_a_store(address)
        return True

    def _hold(self, address: Address) -> None:
        held = [socket.create_connection(address, PATIENCE_S) for _ in range(RANKS + 1)]
        for rank, connection in enumerate(held[:RANKS]):
            connection.sendall(rank.to_bytes(8, "little"))
        self._held[address] = held


def main() -> None:
    attack = Attack()
    with ThreadPoolExecutor(32) as pool:
        for line in sys.stdin:
            asked = [(host, port) for host, port in json.loads(line)]
            took = pool.map(attack, asked)
            reached = [address for address, open_ in zip(asked, took, strict=True) if open_]
            print(json.dumps(reached), flush=True)


if __name__ == "__main__":
    main()
