"""Hosts on one machine: network namespaces that meet at a bridge, each over a link of its own rate.

Every link is a veth pair with a token bucket (`tc tbf`) at both ends, so what leaves a host is
limited and so is what reaches it. Needs root, `ip` and `tc` (iproute2).
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

HUB, HOST, LINK, NET = "weft-hub", "weft-host{}", "link0", "10.91.0."
TOKEN = "of hosts on this machine alone"
QUEUE_S = 0.05  # what a link holds back before it drops


def lacking() -> str | None:
    """Why no testbed can be built here; None if one can."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "there is no ip or tc: install iproute2"
    if os.geteuid() != 0:
        return "network namespaces take root"
    try:
        _sh("ip", "netns", "add", "weft-probe")
        _sh("ip", "netns", "del", "weft-probe")
    except subprocess.CalledProcessError as error:
        return f"no network namespace can be made: {error.stderr.strip()}"
    return None


@contextmanager
def hosts(count: int) -> Iterator[None]:
    """`count` hosts with links of unlimited rate."""
    _down()
    try:
        _sh("ip", "netns", "add", HUB)
        _in(HUB, "ip", "link", "add", "bridge0", "type", "bridge")
        _in(HUB, "ip", "link", "set", "bridge0", "up")
        for i in range(count):
            host, port = HOST.format(i), f"port{i}"
            _sh("ip", "netns", "add", host)
            _in(HUB, "ip", "link", "add", port, "type", "veth", "peer", "name", LINK, "netns", host)
            _in(HUB, "ip", "link", "set", port, "master", "bridge0")
            _in(HUB, "ip", "link", "set", port, "up")
            _in(host, "ip", "addr", "add", f"{NET}{i + 1}/24", "dev", LINK)
            _in(host, "ip", "link", "set", LINK, "up")
            _in(host, "ip", "link", "set", "lo", "up")
            _in(
                host, "ip", "route", "replace", f"{NET}0/24", "dev", LINK, "congctl", "cubic"
            )  # Linux's default
        time.sleep(0.5)
        yield
    finally:
        _down()


def limit(count: int, mbit: float | None) -> None:
    """Give every link this rate in both directions; None: no limit."""
    for i in range(count):
        for namespace, device in ((HOST.format(i), LINK), (HUB, f"port{i}")):
            _in(namespace, "tc", "qdisc", "del", "dev", device, "root", check=False)
            if mbit is not None:
                burst = max(32 * 1024, int(mbit * 1e6 / 8 / 1000))
                queue = burst + int(max(mbit * 1e6 / 8 * QUEUE_S, 300_000))
                rate = ("rate", f"{mbit}mbit", "burst", str(burst), "limit", str(queue))
                _in(namespace, "tc", "qdisc", "add", "dev", device, "root", "tbf", *rate)


def start(host: int, command: Sequence[str], log: Path, **environment: str) -> subprocess.Popen:
    """The command on a host, in a session of its own; what it says goes to the end of a file."""
    with log.open("ab") as out:
        there = ["ip", "netns", "exec", HOST.format(host), *command]
        own = {**os.environ, **environment}
        return subprocess.Popen(
            there, env=own, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )


def power_off(host: int) -> None:
    """Kill all that runs on a host, at once."""
    for process in map(int, _sh("ip", "netns", "pids", HOST.format(host)).split()):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def cut_off(host: int, cut: bool) -> None:
    """Take a host's link down, or up again; nothing tells either side."""
    _in(HUB, "ip", "link", "set", f"port{host}", "down" if cut else "up")


def run(count: int, command: Sequence[str], timeout_s: float, apart: bool = True) -> float:
    """The command `count` times, as the ranks of one job: on a host each, or where not `apart` all
    on this machine. Returns the share of the processors' time that went to other work, which a
    measurement is to be free of. Raises RuntimeError when a rank fails or they do not end in time.
    """
    address, device = (f"{NET}1", LINK) if apart else ("127.0.0.1", "lo")
    port = str(20000 + os.getpid() % 20000)
    processes = []
    began, busy, ours = time.monotonic(), *_cpu_s()
    for rank in range(count):
        own = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            "WEFT_TOKEN": TOKEN,
            "GLOO_SOCKET_IFNAME": device,
            "OMP_NUM_THREADS": "1",
        }
        there = ["ip", "netns", "exec", HOST.format(rank)] if apart else []
        processes.append(subprocess.Popen([*there, *command], env=own, start_new_session=True))
    deadline = time.monotonic() + timeout_s
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() not in (None, 0) for process in processes):
                break
            if time.monotonic() > deadline:
                raise RuntimeError(f"not done in {timeout_s:.0f} s")
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError(
            f"{' '.join(command)} ended with {[process.returncode for process in processes]}"
        )
    busy_now, ours_now = _cpu_s()
    spent = (time.monotonic() - began) * (os.cpu_count() or 1)
    return max(0.0, (busy_now - busy) - (ours_now - ours)) / spent


def _cpu_s() -> tuple[float, float]:
    """Seconds that the processors have worked for processes, and those of them for this one's
    children that ended."""
    user, nice, system, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (user + nice + system) / os.sysconf("SC_CLK_TCK"), children.ru_utime + children.ru_stime


def _down() -> None:
    for path in Path("/run/netns").glob("weft-*"):
        _sh("ip", "netns", "del", path.name, check=False)


def _in(namespace: str, *command: str, check: bool = True) -> str:
    return _sh("ip", "netns", "exec", namespace, *command, check=check)


def _sh(*command: str, check: bool = True) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=check, timeout=20).stdout
