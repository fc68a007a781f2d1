"""Nobody outside touches a run: where its processes listen, and what strangers achieve there."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from tests.commands import Command, children
from tests.train.test_failures import STEPS, begun, steps_of, weights
from weft.cli.app import app
from weft.core.errors import ConfigError, WeftError
from weft.launch import gate, rpc, stores
from weft.launch.elastic_agent import ElasticAgent
from weft.launch.local_workers import Pool
from weft.launch.rendezvous import Rendezvous, interface_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

DILOCO = ("sync.name=diloco", "sync.period=2")
SERVERS = ("sync.name=parameter_server", "sync.staleness=2")
WORKERS = ('workers.big=["blocks.0"]', "layout.axes=dp1")

Address = tuple[str, int]


def listening(pids: list[int]) -> set[Address]:
    """The addresses at which these processes take TCP connections."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    inodes |= set(re.findall(r"^socket:\[(\d+)\]$", os.readlink(link)))
    found = set()
    for table in {f"/proc/{pid}/net/{name}" for pid in pids for name in ("tcp", "tcp6")}:
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and words[9] in inodes:
                    number, port = words[1].split(":")
                    raw = bytes.fromhex(number)
                    packed = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
                    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
                    found.add((socket.inet_ntop(family, packed), int(port, 16)))
    return found


def family(pid: int) -> list[int]:
    """A process, and all below it."""
    return [pid, *(each for child in children(pid) for each in family(child))]


def outside(found: set[Address]) -> set[Address]:
    return {(address, port) for address, port in found if not gate.is_loopback(address)}


def listening_here() -> set[Address]:
    dist.new_group(backend="gloo")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"  # whatever the host's name stands for
    return listening([os.getpid()])


def test_the_ports_of_a_pool() -> None:
    with Pool(2) as processes:
        found = set().union(*processes.run(listening_here))
    assert found and not outside(found)


@pytest.mark.parametrize(
    ("axes", "settings"),
    [
        ("dp2", ()),
        ("pp2", ()),
        ("fsdp2", ()),
        ("dp2", DILOCO),
        ("dp2", SERVERS),
        ("dp1", WORKERS),
    ],
)
def test_a_run_of_one_host_listens_at_the_loopback(
    tmp_path: Path, axes: str, settings: tuple[str, ...]
) -> None:
    more = [word for setting in settings for word in ("--set", setting)]
    found: set[Address] = set()
    with begun(tmp_path, axes, "--set", "train.steps=6", *more) as process:
        while process.poll() is None:
            found |= listening(family(process.pid))
            time.sleep(0.02)
        assert process.returncode == 0, process.said()
    assert found and not outside(found), found


def test_calls_stay_on_the_loopback_whatever_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a cluster names the interface of its network for all runs."""
    network = interface_of(Rendezvous(file="/x").address())
    if network in (None, "lo"):
        pytest.skip("this host has no network")
    monkeypatch.setenv("TP_SOCKET_IFNAME", str(network))
    found: set[Address] = set()
    more = [word for setting in WORKERS for word in ("--set", setting)]
    with begun(tmp_path, "dp1", "--set", "train.steps=6", *more) as process:
        while process.poll() is None:
            found |= listening(family(process.pid))
            time.sleep(0.02)
        assert process.returncode == 0, process.said()
    assert found and not outside(found), found


UNGATED = r"checks no token.* Use one host, or a layout without \[workers\]"


def test_workers_over_several_hosts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        """
        [model]
        build = "weft.models:decoder"
        dim = 16
        heads = 2
        [data]
        build = "weft.data:stdlib"
        [train]
        batch = 4
        steps = 2
        [workers]
        big = ["blocks.0"]
        """
    )
    hosts = ("--nodes", "2", "--rdzv", "127.0.0.1:1")
    said = CliRunner().invoke(app, ["train", str(tmp_path / "run.toml"), *hosts]).output
    assert re.search("--nodes = 2: .*" + UNGATED, " ".join(said.split())), said
    asked = ["launch", "slurm", str(tmp_path / "run.toml"), "--nodes", "2"]
    said = CliRunner().invoke(app, asked).output
    assert re.search(UNGATED, " ".join(said.split())), said


RANK = {"RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "one"),
    [
        ({}, True),  # processes of one host that meet at its loopback
        ({"MASTER_ADDR": "192.0.2.1"}, False),
        ({**RANK, "LOCAL_WORLD_SIZE": "1"}, True),
        ({**RANK, "LOCAL_WORLD_SIZE": "1", "WEFT_AGENT": "fixed"}, False),
        ({**RANK, "LOCAL_WORLD_SIZE": "2", "WEFT_AGENT": "fixed"}, True),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "1.2.3.4"},
            False,
        ),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "1.2.3.4"}, True),
    ],
)
def test_calls_between_hosts_are_refused(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], one: bool
) -> None:
    for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "WEFT_AGENT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if one:
        rpc.check_one_host()
        return
    with pytest.raises(ConfigError, match=UNGATED):
        rpc.check_one_host()


# ---- over several hosts --------------------------------------------------------------------------

TOKEN = "a secret of this test"
GARBAGE = (b"GET / HTTP/1.0\r\n\r\n", b"\0" * 1000, b"\xff" * 1000, bytes(range(256)) * 400)


def strange(address: Address) -> None:
    """What is not of this run: noise, and torch's own client of stores."""
    for noise in GARBAGE:
        with suppress(OSError), socket.create_connection(address, 1.0) as connection:
            connection.sendall(noise)
    client: dist.TCPStore | None = None
    with suppress(RuntimeError):
        client = stores.join_store(*address, timedelta(seconds=1))
    if client is not None:  # what answers is a store
        for key in client.list_keys():
            client.set(key, "gone")


@contextmanager
def attacked(found: set[Address]) -> Iterator[None]:
    """Each of these addresses, again and again; more may be added."""
    over = threading.Event()

    def attack() -> None:
        while not over.wait(0.2):
            for address in list(found):
                strange(address)

    thread = threading.Thread(target=attack)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture
def guarded() -> Iterator[tuple[dist.TCPStore, gate.TokenGate]]:
    store = stores.keep_store()
    way = gate.TokenGate(gate.LOOPBACK, 0, TOKEN, store.port)
    yield store, way
    way.close()


def test_a_store_behind_a_gate(guarded: tuple[dist.TCPStore, gate.TokenGate]) -> None:
    store, way = guarded
    passage = gate.Passage(gate.LOOPBACK, way.port, TOKEN)
    passage.reach(10)
    client = stores.join_store(gate.LOOPBACK, passage.port)
    client.set("key", "value")
    strange((gate.LOOPBACK, way.port))
    idle = [socket.create_connection((gate.LOOPBACK, way.port)) for _ in range(3 * gate.STRANGERS)]
    late = stores.join_store(gate.LOOPBACK, passage.port, timedelta(seconds=gate.PROVE_S / 2))
    sent_away = 0
    for each in idle:
        each.settimeout(0.05)
        with suppress(TimeoutError):
            while each.recv(gate.BLOCK):
                pass
            sent_away += 1
        each.close()
    assert sent_away >= 2 * gate.STRANGERS
    assert late.get("key") == b"value" == store.get("key")
    assert client.add("count", 2) == 2 and sorted(store.list_keys()) == ["count", "key"]
    passage.close()


def test_who_does_not_know_the_token(guarded: tuple[dist.TCPStore, gate.TokenGate]) -> None:
    store, way = guarded
    for token in ("", TOKEN + "."):
        passage = gate.Passage(gate.LOOPBACK, way.port, token)
        with pytest.raises(ConfigError, match="is not the token of the run at") as refused:
            passage.reach(10)
        assert TOKEN not in str(refused.value)
        with pytest.raises(dist.DistError):
            stores.join_store(gate.LOOPBACK, passage.port, timedelta(seconds=1))
        passage.close()
    with socket.create_connection((gate.LOOPBACK, way.port)) as liar:
        liar.settimeout(5)
        liar.sendall(bytes(2 * gate.SIZE))
        said = b"".join(iter(lambda: liar.recv(gate.BLOCK), b""))
        assert len(said) == len(gate.HELLO) + gate.SIZE  # and no more
    server = gate.listen(gate.LOOPBACK)
    port = server.getsockname()[1]
    with pytest.raises(WeftError, match="no run of weft answered"):
        gate.Passage(gate.LOOPBACK, port, TOKEN).reach(1)

    def pretend() -> None:  # to be a gate, without the token
        with server.accept()[0] as connection:
            connection.sendall(gate.HELLO + bytes(gate.SIZE))
            connection.recv(2 * gate.SIZE)
            connection.sendall(bytes(gate.SIZE))

    server.accept()[0].close()
    threading.Thread(target=pretend).start()
    with pytest.raises(ConfigError, match="is not the token of the run at"):
        gate.Passage(gate.LOOPBACK, port, TOKEN).reach(10)
    server.close()
    assert store.list_keys() == []


def test_the_port_that_torchelastic_found_free_may_be_taken() -> None:
    """By any other process, until the ranks' store is to be reached by it."""
    keys = dist.HashStore()
    with socket.create_server((gate.LOOPBACK, 0)) as other:
        hosts = [
            SimpleNamespace(
                master_addr=gate.LOOPBACK,
                master_port=other.getsockname()[1],
                group_rank=number,
                store=keys,
            )
            for number in range(2)
        ]
        agents: list[Any] = [
            SimpleNamespace(_way=None, _token=TOKEN, _ranks_store=None) for _ in hosts
        ]
        for agent, host in zip(agents, hosts, strict=True):
            ElasticAgent._open_way(agent, host)  # type: ignore[arg-type]
    first, second = (stores.join_store(gate.LOOPBACK, host.master_port) for host in hosts)
    first.set("key", "value")
    assert second.get("key") == b"value"
    for agent in agents:
        agent._way.close()


def test_a_token_is_needed_where_others_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gate.TOKEN, raising=False)
    assert gate.run_token("127.0.0.1") == gate.run_token("::1") == ""
    with pytest.raises(ConfigError, match="other machines can reach"):
        gate.run_token("192.0.2.1")
    monkeypatch.setenv(gate.TOKEN, "short")
    with pytest.raises(ConfigError, match="fewer than 16 characters"):
        gate.run_token("192.0.2.1")
    monkeypatch.setenv(gate.TOKEN, TOKEN)
    assert gate.run_token("192.0.2.1") == gate.run_token("127.0.0.1") == TOKEN


@pytest.mark.slow
def test_a_run_of_several_hosts_is_attacked(tmp_path: Path) -> None:
    """On the ports of its stores, by its own host; it ends with the numbers of a run left alone.
    gloo's own are attacked from elsewhere: tests/launch/test_strangers.py."""
    with begun(tmp_path / "alone", "dp2") as process:
        assert process.wait(120) == 0, process.said()
    found: set[Address] = set()
    gates: set[Address] = set()
    meeting = ("--nodes", "2", "--rdzv", f"file://{tmp_path}/meeting")
    with attacked(gates), begun(tmp_path / "run", "dp2", *meeting) as first:
        run, out = tmp_path / "run" / "run.toml", tmp_path / "run" / "out"
        again = ("--layout", "dp2", "--set", "checkpoint.every=2", "--set", "checkpoint.restarts=9")
        second = Command(
            tmp_path / "log", "train", str(run), "--output", str(out), *again, *meeting
        )
        while None in (first.poll(), second.poll()):
            for process in (first, second):
                gates |= outside(listening([process.pid]))
                found |= outside(listening(family(process.pid)))
            time.sleep(0.02)
        assert gates and found > gates
        assert [first.wait(60), second.wait(60)] == [0, 0], first.said() + second.said()
    assert {address for address, _ in found} <= {Rendezvous(file="/x").address()}
    assert steps_of(tmp_path / "run") == list(range(1, STEPS + 1))
    assert "anew" not in first.said()
    once, other = weights(tmp_path / "alone"), weights(tmp_path / "run")
    assert all(torch.equal(once[name], other[name]) for name in once)
