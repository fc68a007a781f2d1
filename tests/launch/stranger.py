"""Someone elsewhere on the network, who tries every port that he is told of.

    python -m tests.launch.stranger

Reads lines of JSON, addresses [[host, port], ...], and answers each with those that took a
connection. To these he sends noise, a request of HTTP and what torch's own clients of stores and of
RPC send; and he keeps a connection open that he says nothing on.
"""

from __future__ import annotations

import json
import socket
import sys
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

GARBAGE = (b"GET / HTTP/1.0\r\n\r\n", b"\0" * 1000, b"\xff" * 1000, bytes(range(256)) * 400)
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


def main() -> None:
    held: dict[Address, socket.socket] = {}
    for line in sys.stdin:
        reached = []
        for host, port in json.loads(line):
            address = host, port
            try:
                if address not in held:
                    held[address] = socket.create_connection(address, 1.0)
                else:
                    socket.create_connection(address, 1.0).close()
            except OSError:
                continue
            reached.append(address)
            send_garbage(address)
            use_as_a_store(address)
        print(json.dumps(reached), flush=True)


if __name__ == "__main__":
    main()
