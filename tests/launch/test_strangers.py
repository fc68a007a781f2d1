"""From another network namespace: every port of every kind of run is tried, and nothing changes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.commands import PATH, Command
from tests.launch.stranger import Address
from tests.launch.test_ports import TOKEN, family, listening, outside
from tests.train.test_failures import STEPS, begun, steps_of, weights
from weft.launch import gate

# hosts of one network: processes that run these tests at the same time have one each
NETWORK = f"10.213.{os.getpid() // 32 % 256}."
HERE, THERE, OTHER = (f"{NETWORK}{os.getpid() % 32 * 8 + host}" for host in (1, 2, 3))
NAME = f"weft-{os.getpid()}"  # the namespace of the stranger; that of the other host has -host


def _has_namespaces() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    with suppress(OSError):
        if subprocess.run(["ip", "netns", "add", f"{NAME}-try"], capture_output=True).returncode:
            return False
        subprocess.run(["ip", "netns", "del", f"{NAME}-try"], check=True)
        return True
    return False


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not _has_namespaces(), reason="takes root, and network namespaces"),
]


class Stranger:
    """A process in a namespace of its own, on the network of the hosts."""

    def __init__(self) -> None:
        self.reached: set[Address] = set()
        self.tried: set[Address] = set()
        where = Path(__file__).parents[2]
        command = ["ip", "netns", "exec", NAME, sys.executable, "-m", "tests.launch.stranger"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=where,
            env={**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"},
        )

    def tries(self, found: set[Address]) -> set[Address]:
        """All of these, by the address at which they listen and by those of the hosts. Those that
        took a connection."""
        asked = sorted({(at, port) for _, port in found for at in (HERE, OTHER)} | outside(found))
        asked = [(HERE if host in ("0.0.0.0", "::") else host, port) for host, port in asked]
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        reached = {(host, port) for host, port in json.loads(self.process.stdout.readline())}
        self.tried |= set(asked)
        self.reached |= reached
        return reached


@pytest.fixture
def stranger(someone: Stranger) -> Stranger:
    someone.reached, someone.tried = set(), set()
    return someone


@pytest.fixture(scope="module")
def someone() -> Iterator[Stranger]:
    number = os.getpid() % 10**6
    bridge = f"weft{number}"
    commands = [
        ["ip", "link", "add", bridge, "type", "bridge"],
        ["ip", "addr", "add", f"{HERE}/29", "dev", bridge],
        ["ip", "link", "set", bridge, "up"],
    ]
    for namespace, address in ((NAME, THERE), (f"{NAME}-host", OTHER)):
        cable, far, inside = f"w{address[-1]}c{number}", "far0", ["ip", "-n", namespace]
        commands += [
            ["ip", "netns", "add", namespace],
            ["ip", "link", "add", cable, "type", "veth", "peer", "name", far, "netns", namespace],
            ["ip", "link", "set", cable, "master", bridge, "up"],
            [*inside, "addr", "add", f"{address}/29", "dev", far],
            [*inside, "link", "set", far, "up"],
            [*inside, "link", "set", "lo", "up"],
            [*inside, "route", "add", "default", "via", HERE],
        ]
    try:
        for command in commands:
            subprocess.run(command, check=True)
        found = Stranger()
        try:
            with socket.create_server((HERE, 0)) as open_to_all:  # that he reaches what there is
                address = open_to_all.getsockname()[:2]
                assert found.tries({address}) == {address}
            yield found
        finally:
            found.process.kill()
            found.process.wait()
    finally:
        for namespace in (NAME, f"{NAME}-host"):  # and its cable with it
            subprocess.run(["ip", "netns", "del", namespace], check=False)
        subprocess.run(["ip", "link", "del", bridge], check=False)


LOCAL = ("sync.name=local_sgd", "sync.period=4")
DILOCO = ("sync.name=diloco", "sync.period=4", "sync.fragments=2", "sync.delay=1")
SERVERS = ("sync.name=parameter_server", "sync.staleness=2")
WORKERS = ('workers.big=["blocks.0"]', "layout.axes=dp1")
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "all-reduce": ("dp2", ()),
    "a pipeline": ("pp2", ()),
    "local SGD": ("dp2", LOCAL),
    "DiLoCo": ("dp2", DILOCO),
    "asynchronous servers": ("dp2", SERVERS),
    "workers": ("dp1", WORKERS),
}


@cache
def left_alone(folder: Path, axes: str, settings: tuple[str, ...]) -> dict[str, torch.Tensor]:
    with begun(folder, axes, *_words(settings)) as process:
        assert process.wait(120) == 0, process.said()
    return weights(folder)


def _words(settings: tuple[str, ...]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def _same(folder: Path, once: dict[str, torch.Tensor]) -> bool:
    other = weights(folder)
    return other.keys() == once.keys() and all(torch.equal(once[n], other[n]) for n in once)


@pytest.mark.grid(2, ci=2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_one_host(tmp_path: Path, stranger: Stranger, kind: str) -> None:
    axes, settings = KINDS[kind]
    with begun(tmp_path / "run", axes, *_words(settings)) as process:
        while process.poll() is None:
            found = listening(family(process.pid))
            assert not outside(found), found
            stranger.tries(found)
            time.sleep(0.02)
        assert process.returncode == 0, process.said()
    assert len(stranger.tried) > 1 and not stranger.reached
    assert steps_of(tmp_path / "run") == list(range(1, STEPS + 1))
    assert "anew" not in process.said()
    if kind != "asynchronous servers":  # whose order of updates is another one each time
        assert _same(tmp_path / "run", left_alone(tmp_path / "alone", axes, settings))


@contextmanager
def elsewhere(log: Path, *arguments: str) -> Iterator[subprocess.Popen]:
    """`weft ...` on the other host."""
    command = ["ip", "netns", "exec", f"{NAME}-host", sys.executable, "-m", "weft", *arguments]
    environment = {**os.environ, "PYTHONPATH": PATH}
    with (
        log.open("w") as out,
        subprocess.Popen(command, stdout=out, stderr=out, env=environment) as it,
    ):
        try:
            yield it
        finally:
            it.kill()


@pytest.mark.grid(1, ci=1)
@pytest.mark.parametrize("hosts", ["at two addresses", "at one address", "at the loopback"])
def test_agents(
    tmp_path: Path, stranger: Stranger, monkeypatch: pytest.MonkeyPatch, hosts: str
) -> None:
    """Two of them, which meet at the loopback, or where the stranger gets to their gates: nothing
    else takes a connection, and those of gloo are open to the hosts of the run alone."""
    monkeypatch.setenv(gate.TOKEN, TOKEN)
    open_ports = hosts != "at the loopback"
    at = HERE if open_ports else gate.LOOPBACK
    with socket.create_server((at, 0)) as probe:
        port = probe.getsockname()[1]
    meeting = ("--nodes", "2", "--rdzv", f"{at}:{port}")
    run, out = tmp_path / "run" / "run.toml", tmp_path / "run" / "out"
    again = ("--layout", "dp2", "--set", "checkpoint.every=2", "--set", "checkpoint.restarts=9")
    command = ("train", str(run), "--output", str(out), *again, *meeting)
    with begun(tmp_path / "run", "dp2", *meeting) as first, ExitStack() as after:
        log = tmp_path / "log"
        second: Command | subprocess.Popen
        if hosts == "at two addresses":
            second = after.enter_context(elsewhere(log, *command))
        else:
            second = Command(log, *command)
        gates: set[Address] = set()
        while None in [host.poll() for host in (first, second)]:
            found = listening([*family(first.pid), *family(second.pid)])
            gates |= outside(listening([first.pid, second.pid]))
            stranger.tries(found)
            assert stranger.reached <= gates, stranger.reached - gates
            time.sleep(0.02)
        said = first.said() + log.read_text()
        assert [host.wait(60) for host in (first, second)] == [0, 0], said
    assert bool(stranger.reached) == open_ports
    assert len(outside(stranger.tried) - gates) > 2  # of gloo
    assert "can reach gloo's ports" not in said
    assert steps_of(tmp_path / "run") == list(range(1, STEPS + 1))
    assert "anew" not in said
    assert _same(tmp_path / "run", left_alone(tmp_path / "alone", "dp2", ()))
