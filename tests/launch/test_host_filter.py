"""Who reaches gloo's ports. 127.0.0.2 is a host as any other to 127.0.0.1."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from tests.launch.test_ports import Address, listening
from weft._torch.gloo import guard_gloo
from weft.launch import host_filter
from weft.launch.local_workers import Pool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such filters")


def reaches(source: str, address: Address) -> bool:
    try:
        socket.create_connection(address, 0.3, source_address=(source, 0)).close()
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    ("admitted", "comes", "not_"),
    [
        (["127.0.0.1"], ["127.0.0.1"], ["127.0.0.2", "127.1.0.1"]),
        (["10.0.0.1", "127.0.0.2", "127.0.0.9"], ["127.0.0.2", "127.0.0.9"], ["127.0.0.1"]),
        # of more than a filter has room for it is their networks: here of 4 addresses
        (
            [f"127.0.{i // 250}.{i % 250}" for i in range(host_filter.MOST * 4)],
            ["127.0.0.0", "127.0.3.9"],
            ["127.0.4.250", "127.1.0.1", "127.0.200.1"],
        ),
    ],
)
def test_a_filter(admitted: Collection[str], comes: list[str], not_: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host_filter.attach_filter(listener, admitted)
        address = listener.getsockname()
        assert [source for source in [*comes, *not_] if reaches(source, address)] == comes


def guarded_sum() -> tuple[list[float], int, list[bool]]:
    """Somebody connects to the first port, before it is guarded, as rank 0 and as rank 1."""
    early: list[socket.socket] = []
    guarded: list[int] = []

    def guard(listener: socket.socket) -> None:
        guarded.append(listener.getsockname()[1])
        for rank in range(2) if len(guarded) == 1 else ():
            early.append(socket.create_connection(listener.getsockname()))
            early[-1].sendall(rank.to_bytes(8, "little"))
        host_filter.attach_filter(listener, ["127.0.0.1"])

    guard_gloo(guard)
    numbers = torch.ones(3)
    dist.all_reduce(numbers, group=dist.new_group(backend="gloo"))
    last = ("127.0.0.1", guarded[-1])
    assert last in listening([os.getpid()])
    return numbers.tolist(), len(guarded), [reaches(f"127.0.0.{i}", last) for i in (1, 2)]


def test_who_comes_before_the_guard_is_in_no_group() -> None:
    with Pool(2) as processes:
        assert processes.run(guarded_sum) == [([2.0] * 3, 2, [True, False])] * 2


def test_who_comes_before_every_guard() -> None:
    with Pool(1) as processes, pytest.raises(Exception, match="others connected to each of 20"):
        processes.run(always_early)


def always_early() -> None:
    early = []
    guard_gloo(lambda listener: early.append(socket.create_connection(listener.getsockname())))
    dist.new_group(backend="gloo")


Guard = Callable[[socket.socket], None]


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> list[Guard]:
    found: list[Guard] = []
    monkeypatch.setattr(host_filter, "guard_gloo", found.append)
    return found


def meet(monkeypatch: pytest.MonkeyPatch, addresses: dict[int, list[str]]) -> None:
    """Ranks whose gloo listens at these addresses, and who send from .2 of each network."""
    store = dist.HashStore()
    own = iter(addresses.values())
    monkeypatch.setattr(host_filter, "_gloo_addresses", lambda: next(own))
    monkeypatch.setattr(
        host_filter, "source_towards", lambda address: address.rpartition(".")[0] + ".2"
    )
    with ThreadPoolExecutor() as pool:
        count = len(addresses)
        list(pool.map(lambda rank: host_filter.admit_hosts(store, rank, count), addresses))


def test_hosts_come_from_where_they_listen_and_from_where_they_send(
    monkeypatch: pytest.MonkeyPatch, guards: list[Guard]
) -> None:
    meet(monkeypatch, {0: ["127.0.0.1"], 1: ["127.0.7.1"]})
    assert not guards  # where all is at the loopback, only this host comes
    meet(monkeypatch, {0: ["10.0.0.1"], 1: ["127.0.7.1", "127.0.8.1"], 2: ["10.0.0.1"]})
    assert len(guards) == 2
    hosts = ["127.0.7.1", "127.0.7.2", "127.0.8.1", "127.0.8.2"]
    for guard in guards:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            guard(listener)
            address = listener.getsockname()
            others = ["127.0.0.1", "127.0.7.3"]
            assert [source for source in hosts + others if reaches(source, address)] == hosts


def test_where_no_filter_can_be_had_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, guards: list[Guard], capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    meet(monkeypatch, {0: ["10.0.0.1"], 1: []})
    assert (
        capfd.readouterr().err.count(
            "everybody on the network can reach gloo's ports: the address of one host is not known"
        )
        == 2
    )
    monkeypatch.setattr(host_filter, "SO_ATTACH_FILTER", 9999)
    meet(monkeypatch, {0: ["10.0.0.1"], 1: ["10.0.0.2"]})
    assert "this kernel filters no connections" in capfd.readouterr().err
    assert not guards
