"""A run over several hosts, each an agent and its ranks: one is lost and comes back, and the
numbers stay the run's."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.commands import Command, children
from tests.train.test_failures import Slow, steps_of, weights
from tests.train.test_trainer import RUN
from weft.cli.app import app
from weft.core import run_config
from weft.core.errors import ConfigError, LayoutError
from weft.core.layout import Layout
from weft.launch import elastic_agent
from weft.launch.rendezvous import Rendezvous, interface_of, parse_nodes
from weft.train.elastic_layout import shrink_to, smaller_layouts

STEPS = 90


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """All hosts are this one: none takes long to come, or to hear of the end."""
    monkeypatch.setattr(elastic_agent, "MORE_S", 4.0)
    monkeypatch.setattr(elastic_agent, "LINGER_S", 1.0)


class Slower(Slow):
    """Time enough for a host to come back."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.02)
        return super().__getitem__(index)


def written(folder: Path, steps: int = STEPS, more: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = RUN.replace(
        "tests.train.test_trainer:Ramps", "tests.launch.test_elastic:Slower"
    ).replace("steps = 6", f"steps = {steps}")
    text = (
        text.replace("batch = 8", "batch = 12")
        .replace("every = 3", "every = 4")
        .replace("hidden = 32", "hidden = 36")
    )
    (folder / "run.toml").write_text(f'{text}[precision]\ncompute = "fp64"\n{more}')
    return folder / "run.toml"


class Host:
    """`weft train` as one of several hosts, all of which are this one."""

    def __init__(self, run: Path, *arguments: str):
        log = run.parent / f"log-{time.monotonic_ns()}"
        self.process = Command(
            log, "train", str(run), "--output", str(run.parent / "out"), *arguments
        )
        self.said = self.process.said

    def vanish(self) -> None:
        """As a host that loses its power: nothing is said, and nothing is left."""
        gone = [*children(self.process.pid), self.process.pid]
        for process in gone:
            os.kill(process, signal.SIGKILL)
        self.process.wait(10)


@contextmanager
def ended(hosts: list[Host]) -> Iterator[None]:
    try:
        yield
    finally:
        for host in hosts:
            if host.process.poll() is None:
                host.vanish()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(true: object, what: str, hosts: list[Host], patience_s: float = 90.0) -> None:
    deadline = time.monotonic() + patience_s
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline, what + "".join(
            f"\n---\n{host.said()[-3000:]}" for host in hosts
        )
        time.sleep(0.05)


def at(folder: Path) -> int:
    return (steps_of(folder) or [0])[-1]


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_host_that_is_lost_and_comes_back(tmp_path: Path) -> None:
    """Three hosts of one rank each, of which the run can do with two."""
    run = written(tmp_path / "lost")
    port = free_port()
    common = (
        "--layout",
        "dp3",
        "--nodes",
        "2:3",
        "--rdzv",
        f"127.0.0.1:{port}",
        "--set",
        "checkpoint.restarts=6",
    )
    hosts = [Host(run, *common)]
    with ended(hosts):
        until(lambda: listens(port), "no store", hosts)  # the first keeps it, and stays
        hosts += [Host(run, *common) for _ in range(2)]
        until(lambda: at(tmp_path / "lost") >= 8, "no steps", hosts)
        lost = at(tmp_path / "lost")
        victim = hosts[2]
        victim.vanish()
        until(
            lambda: "layout dp2" in "".join(host.said() for host in hosts),
            "no layout of two",
            hosts,
        )
        until(lambda: at(tmp_path / "lost") >= lost + 8, "no steps of two", hosts)
        hosts.append(Host(run, *common))
        for host in hosts:
            assert host is victim or host.process.wait(200) == 0, host.said()
    said = "".join(host.said() for host in hosts)
    assert (
        "2 of 3 hosts are here: 2 ranks" in said
        and said.count("3 of 3 hosts are here: 3 ranks") == 2
    )
    assert "2 ranks are here: layout dp2, in place of dp3" in said
    assert steps_of(tmp_path / "lost") == list(range(1, STEPS + 1))
    assert 'axes = "dp3"' in (tmp_path / "lost" / "out" / "run.toml").read_text()
    alone = Host(
        written(tmp_path / "alone"),
        "--layout",
        "dp1",
        "--set",
        "data.build=tests.train.test_trainer:Ramps",
    )
    with ended([alone]):
        assert alone.process.wait(120) == 0, alone.said()
    once, other = weights(tmp_path / "alone", STEPS), weights(tmp_path / "lost", STEPS)
    worst = max(float((once[name] - other[name]).abs().max()) for name in once)
    assert once.keys() == other.keys() and worst < 1e-9, worst


def test_a_host_that_is_told_to_stop(tmp_path: Path) -> None:
    """With a fixed number of hosts all save and end; the same command goes on."""
    run, common = written(tmp_path, 24), ("--layout", "dp2", "--nodes", "2", "--auto-resume")
    for stops in (True, False):
        meeting = ("--rdzv", f"file://{tmp_path}/meeting")  # the same each time
        hosts = [Host(run, *common, *meeting) for _ in range(2)]
        with ended(hosts):
            if stops:
                until(lambda: at(tmp_path) >= 6, "no steps", hosts)
                hosts[1].process.send_signal(signal.SIGUSR1)
            assert [host.process.wait(120) for host in hosts] == [75 if stops else 0] * 2, hosts[
                0
            ].said()
    assert steps_of(tmp_path) == list(range(1, 25))
    assert "resumed" in "".join(host.said() for host in hosts)


def test_hosts_with_other_settings_do_not_run_together(tmp_path: Path) -> None:
    run = written(tmp_path, 24)
    common = ("--layout", "dp2", "--nodes", "2", "--rdzv", f"file://{tmp_path}/meeting")
    hosts = [Host(run, *common), Host(run, *common, "--set", "train.clip=0.7")]
    with ended(hosts):
        until(lambda: any(host.process.poll() is not None for host in hosts), "they run", hosts)
        refused = next(host for host in hosts if host.process.poll() is not None)
        assert refused.process.returncode == 2 and "other settings uses this" in refused.said()


@pytest.mark.parametrize(
    ("axes", "ranks", "best"),
    [
        ("dp4.tp2", 6, ["dp3.tp2"]),
        ("dp2.tp4", 6, ["tp4", "dp3.tp2"]),  # tp3 would divide what tp4 does not
        ("pp4.dp2", 6, ["pp3.dp2", "pp4"]),
        ("dp4.fsdp2+zero2.tp2+sequence", 12, ["dp3.fsdp2+zero2.tp2+sequence"]),
        ("tp8", 6, ["tp4", "tp2", "dp1"]),
        ("dp4.tp2", 3, ["tp2", "dp3"]),  # which keeps what a rank holds
        ("fsdp8", 3, ["fsdp3", "fsdp2", "dp1"]),
        ("dp2+experts.tp2", 1, ["dp1"]),
    ],
)
def test_layouts_of_fewer_ranks(axes: str, ranks: int, best: list[str]) -> None:
    found = [str(layout) for layout in smaller_layouts(Layout.parse(axes), ranks)]
    assert found[: len(best)] == best
    assert len(found) == len(set(found)) and all(
        Layout.parse(text).world <= ranks for text in found
    )


def test_the_layout_that_takes_its_place(tmp_path: Path) -> None:
    run = run_config.load_run(
        written(tmp_path), {"layout.axes": "dp4.tp2", "layout.elastic": "true"}
    )
    assert shrink_to(run, 9) is run and shrink_to(run, 8) is run
    assert [str(shrink_to(run, ranks).layout.axes) for ranks in (7, 6, 5, 3, 1)] == [
        "dp3.tp2",
        "dp3.tp2",
        "dp2.tp2",
        "tp2",
        "dp1",
    ]
    named = run_config.load_run(
        written(tmp_path), {"layout.axes": "dp4.tp2", "layout.elastic": '["dp2.tp2", "tp2"]'}
    )
    assert [str(shrink_to(named, ranks).layout.axes) for ranks in (7, 4, 3)] == [
        "dp2.tp2",
        "dp2.tp2",
        "tp2",
    ]
    with pytest.raises(LayoutError, match="no layout of at most 1 ranks can take its place"):
        shrink_to(named, 1)
    for text, says in (
        ("3", "neither true nor a list"),
        ('["dp2", "xx"]', "is not an axis with a size"),
    ):
        with pytest.raises((ConfigError, LayoutError), match=says):
            run_config.load_run(written(tmp_path), {"layout.elastic": text})


NAMES = {"head": "127.0.1.1"}


def test_where_hosts_meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert parse_nodes("4") == (4, 4) and parse_nodes("2:4") == (2, 4)
    for text in ("", "0", "4:2", "two", "2:4:6", "-1"):
        with pytest.raises(ConfigError, match="is not a number of hosts"):
            parse_nodes(text)
    for text, wants in (
        ("a.b:5", "a.b:5"),
        ("tcp://10.0.0.1:7", "10.0.0.1:7"),
        ("head", "head:29400"),
        ("[::1]:80", "[::1]:80"),
        (f"file://{tmp_path}/x", f"file://{tmp_path}/x"),
    ):
        assert str(Rendezvous.parse(text)) == wants
    for text in (
        "",
        "http://x",
        "a:b",
        "x:99999",
        "x:0",
        "file://x",
        "file:///no/such/folder",
        "env://",
        "a b",
    ):
        with pytest.raises(ConfigError, match="--rdzv"):
            Rendezvous.parse(text)
    monkeypatch.setenv("MASTER_ADDR", "head")
    monkeypatch.setenv("MASTER_PORT", "17")
    assert Rendezvous.parse("env://") == Rendezvous("head", 17)
    here = Rendezvous.parse("127.0.0.1:1")
    assert here.address() == "127.0.0.1" and here.here() and interface_of("127.0.0.1") == "lo"
    monkeypatch.setattr(
        "socket.getaddrinfo",
        lambda host, port, **how: [(2, 2, 0, "", (NAMES.get(host, host), port))],
    )
    named = Rendezvous("head", 17)  # which stands for a loopback on itself
    assert named.here() and named.address() == Rendezvous(file="/x").address()
    assert not Rendezvous.parse("192.0.2.9").here() and interface_of("192.0.2.9") is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert interface_of("127.0.0.1") == "lo0" and interface_of("192.0.2.9") is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nodes", "2"], "--nodes = '2': does not say where they meet"),
        (["--rdzv", "a:1"], "--rdzv = 'a:1': does not say how many hosts"),
        (["--nodes", "x", "--rdzv", "a:1"], "is not a number of hosts"),
        (
            ["--nodes", "3", "--rdzv", "127.0.0.1:1", "--layout", "dp2"],
            "layout dp2 has 2 ranks, and there are 3",
        ),
        (
            ["--nodes", "1:2", "--nproc", "1", "--rdzv", "127.0.0.1:1", "--layout", "dp4"],
            "there are 2 on 2 hosts",
        ),
        (
            [
                "--nodes",
                "1:2",
                "--rdzv",
                "127.0.0.1:1",
                "--layout",
                "dp2",
                "--set",
                "sync.name=bmuf",
                "--set",
                "sync.period=2",
            ],
            "continue without a failed one",
        ),
        (
            [
                "--nodes",
                "1:3",
                "--rdzv",
                "127.0.0.1:1",
                "--layout",
                "dp3",
                "--set",
                'layout.elastic=["dp2"]',
            ],
            "no layout of at most 1 ranks",
        ),
        (["--resume", "--auto-resume"], "Give one of them"),
    ],
)
def test_what_several_hosts_are_refused(tmp_path: Path, arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["train", str(written(tmp_path)), *arguments])
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.output.split()), result.output


@pytest.mark.slow
def test_ranks_that_are_left_over_stand_by(tmp_path: Path) -> None:
    """And take part when another fails: its host's agent starts all anew."""
    run = written(tmp_path, 24)
    common = ("--layout", "dp1", "--nodes", "1:2", "--rdzv", f"file://{tmp_path}/meeting")
    hosts = [Host(run, *common) for _ in range(2)]
    with ended(hosts):
        until(lambda: any("step 6/24" in host.said() for host in hosts), "no steps", hosts)
        at_work = next(host for host in hosts if "step 6/24" in host.said())
        os.kill(children(at_work.process.pid)[0], signal.SIGKILL)
        assert [host.process.wait(120) for host in hosts] == [0, 0], "".join(
            host.said() for host in hosts
        )
    said = "".join(host.said() for host in hosts)
    assert "2 ranks are here, 1 of them as spares: layout dp1, in place of dp1" in said
    assert "killed by SIGKILL; all ranks restart" in said and "resumed" in said
    assert steps_of(tmp_path) == list(range(1, 25))
