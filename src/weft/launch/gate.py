"""The way to a store of another host, for who knows the run's token. No torch.

    TokenGate(address, port, token, store)   on the host of the store: a port of one address of it
    Passage(host, port, token)          on every other host: a port of its loopback that leads there

A TCPStore tells all its keys to whoever connects, and takes any. So it listens at the loopback, and
on the network a gate stands before it: both sides prove that they know the token, which is not
sent, by an HMAC over numbers that both have drawn. From then on bytes pass as they are, neither
encrypted nor signed.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
import threading
from abc import ABC, abstractmethod
from contextlib import suppress

from weft.core import ConfigError, WeftError

TOKEN = "WEFT_TOKEN"
LEAST = 16  # characters of a token
HIDDEN = "..."  # for a token in what is said
LOOPBACK = "127.0.0.1"
HELLO = b"weft gate 1\n"
SIZE = 32  # bytes of a number that is drawn, and of a proof
PROVE_S = 10.0  # for the other side to prove that it knows the token
STRANGERS = 64  # that may be about to prove it; of more the one that came first is sent away
AGAIN_S = 0.5
BLOCK = 1 << 16

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def run_token(address: str) -> str:
    """That of WEFT_TOKEN. Raises ConfigError: others on the network reach this address, and there
    is none."""
    token = os.environ.get(TOKEN, "")
    if len(token) >= LEAST or (not token and is_loopback(address)):
        return token
    problem = (
        f"has fewer than {LEAST} characters"
        if token
        else (f"other machines can reach {address} too")
    )
    fix = f"set {TOKEN} to the same secret on all hosts, as printed by: openssl rand -hex 16"
    raise ConfigError(TOKEN, HIDDEN if token else "", problem, fix)


def ungated_error(field: str, value: object) -> ConfigError:
    """[workers] over several hosts. No gate can stand before what calls them: its processes tell
    one another the addresses at which they listen."""
    problem = (
        "[workers] use torch.distributed.rpc, which checks no token: on several hosts, anyone"
        " who reaches a worker's port could run code in it"
    )
    return ConfigError(field, value, problem, "use one host, or a layout without [workers]")


def is_loopback(address: str) -> bool:
    """Whether only this host itself reaches it."""
    return address.startswith("127.") or address == "::1"


def listen(address: str, port: int = 0) -> socket.socket:
    """A port of this address alone. Raises OSError if it is taken."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=4096)


class _Relay(ABC):
    """A port, and a thread that joins each connection to it with one elsewhere."""

    def __init__(self, server: socket.socket, guests: int = 0):
        self.port: int = server.getsockname()[1]
        self._server, self._most = server, guests + STRANGERS
        self._loop = asyncio.new_event_loop()
        self._strangers: dict[asyncio.Task, None] = {}
        started = threading.Event()
        threading.Thread(target=self._run, args=(started,), name="weft gate", daemon=True).start()
        started.wait()

    def close(self) -> None:
        """Close the port, and all connections."""
        with suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        serve = asyncio.start_server(self._join, sock=self._server, backlog=4096)
        server = self._loop.run_until_complete(serve)
        self._loop.call_soon(started.set)
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    @abstractmethod
    async def _meet(self, here: Streams) -> Streams:
        """The other end of a connection. Raises OSError, WeftError."""

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        here = reader, writer
        meeting = asyncio.ensure_future(asyncio.wait_for(self._meet(here), PROVE_S))
        self._strangers[meeting] = None
        if len(self._strangers) > self._most:
            first = next(iter(self._strangers))
            del self._strangers[first]
            first.cancel()
        try:
            there = await meeting
        except (OSError, WeftError, EOFError, TimeoutError, asyncio.CancelledError):
            return writer.close()
        finally:
            self._strangers.pop(meeting, None)
        ways = (_pass(here[0], there[1]), _pass(there[0], here[1]))
        await asyncio.gather(*ways)
        return None


class TokenGate(_Relay):
    """Leads whoever proves to know `token` to the port `store` of the loopback; of more than
    `guests` who are about to prove it the first are taken for strangers. Raises OSError if the port
    is taken."""

    def __init__(self, address: str, port: int, token: str, store: int, guests: int = 0):
        self._token, self._store = token, store
        super().__init__(listen(address, port), guests)

    async def _meet(self, here: Streams) -> Streams:
        reader, writer = here
        own = secrets.token_bytes(SIZE)
        writer.write(HELLO + own)
        theirs, proof = await reader.readexactly(SIZE), await reader.readexactly(SIZE)
        if not hmac.compare_digest(proof, _proof(self._token, b"guest", own, theirs)):
            raise WeftError("does not have the run's token")
        there = await asyncio.open_connection(LOOPBACK, self._store)
        writer.write(_proof(self._token, b"gate", own, theirs))
        return there


class Passage(_Relay):
    """Leads whoever connects to this port of the loopback through a gate."""

    def __init__(self, host: str, port: int, token: str):
        self._host, self._to, self._token = host, port, token
        super().__init__(listen(LOOPBACK))

    def reach(self, patience_s: float) -> None:
        """Wait until the gate opens. Raises WeftError: it did not, or to others alone."""

        async def once() -> None:
            _, writer = await asyncio.wait_for(self._meet(None), patience_s)
            writer.close()

        try:
            asyncio.run(once())
        except TimeoutError:
            at = f"{self._host}:{self._to}"
            raise WeftError(f"no run of weft answered at {at} within {patience_s:.0f} s") from None

    async def _meet(self, here: Streams | None) -> Streams:
        while True:
            try:
                return await asyncio.wait_for(self._enter(), PROVE_S / 2)
            except OSError:  # nobody is there yet
                await asyncio.sleep(AGAIN_S)

    async def _enter(self) -> Streams:
        at, there = f"{self._host}:{self._to}", await asyncio.open_connection(self._host, self._to)
        reader, writer = there
        try:
            said = await reader.readexactly(len(HELLO) + SIZE)
            if not said.startswith(HELLO):
                raise EOFError
            theirs, own = said[len(HELLO) :], secrets.token_bytes(SIZE)
            writer.write(own + _proof(self._token, b"guest", theirs, own))
            proof = await reader.read(SIZE)
            if not hmac.compare_digest(proof, _proof(self._token, b"gate", theirs, own)):
                fix = f"set {TOKEN} to the same secret on all hosts"
                raise ConfigError(TOKEN, HIDDEN, f"is not the token of the run at {at}", fix)
        except EOFError:
            writer.close()
            fix = "name a port that nothing else uses"
            raise ConfigError(
                "--rdzv", at, "the process that answers there is not a run of weft", fix
            ) from None
        except BaseException:
            writer.close()
            raise
        return there


def _proof(token: str, side: bytes, gates: bytes, guests: bytes) -> bytes:
    return hmac.digest(token.encode(), side + gates + guests, "sha256")


async def _pass(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """All bytes one way, until either end is closed."""
    with suppress(OSError):
        while data := await source.read(BLOCK):
            sink.write(data)
            await sink.drain()
    sink.close()
