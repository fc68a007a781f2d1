"""`weft doctor`: what follows from made-up facts, the command on this machine, and three hosts as
processes of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from weft.cli import doctor_run_check
from weft.cli.app import app
from weft.core import run_config
from weft.launch.doctor import (
    allreduce_check,
    cgroups,
    checks,
    clocks,
    compare_hosts,
    folder,
    gpus,
    host_rendezvous,
    layout_fit,
    limited_process,
    links,
    machine,
    network,
    ports,
    report,
    shared_folder,
)
from weft.launch.doctor.checks import DoctorRequest, HostReport
from weft.launch.doctor.findings import Finding, Host
from weft.launch.doctor.limited_process import LimitedProcessError, run_limited
from weft.launch.rendezvous import Rendezvous
from weft.planner import run_precision

RUN = """
[model]
build = "weft.models:decoder"
vocab = 256
dim = 16
layers = 1
heads = 2
seq_len = 8
[data]
build = "weft.data:stdlib"
seq_len = 8
[layout]
axes = "dp2"
[train]
batch = 4
steps = 10
[checkpoint]
every = 5
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(f'output = "{tmp_path / "out"}"\n{RUN}')
    return path


def host(name: str, **facts: dict[str, Any]) -> Host:
    return Host(
        name,
        "10.0.0.1",
        tuple(Finding(check, "ok", "", "", found) for check, found in facts.items()),
    )


# ---- time limits ---------------------------------------------------------------------------------


def hang(folder: Path) -> None:
    try:
        time.sleep(600)
    finally:
        (folder / "cleaned").touch()


def last_words() -> None:
    os.write(2, b"one thing\nthe disk is gone\n")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_check_that_hangs_is_ended_and_cleans_up(tmp_path: Path) -> None:
    began = time.monotonic()
    finding = checks.run_check(("hang", 0.5, partial(hang, tmp_path)))
    assert finding == Finding("hang", "wrong", "no answer within 0.5 s")
    assert (tmp_path / "cleaned").exists()
    assert time.monotonic() - began < 5


def test_one_that_does_not_end_by_being_asked_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)

    monkeypatch.setattr(limited_process, "GENTLE_S", 0.2)
    began = time.monotonic()
    with pytest.raises(LimitedProcessError, match="no answer"):
        run_limited(0.5, deaf)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (last_words, "killed by SIGKILL: the disk is gone"),
        (lambda: os._exit(3), "exited with code 3"),
        (lambda: 1 // 0, "ZeroDivisionError: integer division or modulo by zero"),
        (
            lambda: run_config.load_run("no such file"),
            "run file = 'no such file': there is no such file.",
        ),
    ],
)
def test_a_check_that_fails_is_wrong_with_its_message(
    function: Callable[[], Any], says: str
) -> None:
    finding = checks.run_check(("fails", 20.0, function))
    assert finding is not None
    assert finding.state == "wrong"
    assert finding.found.startswith(says)


def many() -> int:
    return sum(run_limited(20.0, int, 1) for _ in range(300))


@pytest.mark.slow
def test_a_child_that_is_ended_while_it_ends_never_becomes_its_parent() -> None:
    assert run_limited(120.0, many) == 300  # without care one in some 300 does


# ---- one machine ---------------------------------------------------------------------------------


def tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_control_group_of_version_2_and_those_above_it(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        proc__self__cgroup="0::/jobs/one\n",
        sys__fs__cgroup__jobs__cpu_DOT_max="150000 100000\n",
    )
    tree(
        root,
        sys__fs__cgroup__jobs__one__cpu_DOT_max="max 100000",
        sys__fs__cgroup__jobs__one__memory_DOT_max="4096",
    )
    assert cgroups.cores(root) == 1.5
    assert cgroups.memory_bytes(root) == 4096


def test_a_control_group_of_version_1(tmp_path: Path) -> None:
    cpu = "sys__fs__cgroup__cpu,cpuacct__"
    root = tree(tmp_path, proc__self__cgroup="4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n0::/\n")
    tree(root, **{f"{cpu}cpu_DOT_cfs_quota_us": "-1", f"{cpu}cpu_DOT_cfs_period_us": "100000"})
    assert cgroups.cores(root) is None
    tree(root, **{f"{cpu}cpu_DOT_cfs_quota_us": "50000"})
    assert (
        cgroups.cores(root) == 0.5
    )  # in a container the group's own path is not there: the root is its group
    tree(root, sys__fs__cgroup__memory__memory_DOT_limit_in_bytes=str(2**63 - 4096))
    assert cgroups.memory_bytes(root) is None
    tree(root, sys__fs__cgroup__memory__memory_DOT_limit_in_bytes="8192")
    assert cgroups.memory_bytes(root) == 8192


@pytest.mark.parametrize(
    ("allowed", "quota", "omp", "usable", "state", "advice"),
    [
        (8, None, None, 8, "ok", "cores // processes"),
        (
            8,
            2.5,
            None,
            2,
            "note",
            "weft assumes 8 cores: set OMP_NUM_THREADS or train.threads to 2 // processes",
        ),
        (8, 2.5, "1", 2, "ok", ""),
        (4, None, "16", 4, "note", "OMP_NUM_THREADS=4"),
        (4, None, "many", 4, "note", "is not a number of threads"),
        (1, 0.5, "1", 1, "ok", ""),
    ],
)
def test_cores(
    allowed: int, quota: float | None, omp: str | None, usable: int, state: str, advice: str
) -> None:
    finding = machine.judge_cores(
        {"machine": 64, "allowed": allowed, "quota": quota, "omp": omp, "fast": []}
    )
    assert (finding.state, finding.facts["usable"]) == (state, usable)
    assert advice in finding.advice


def test_a_small_shared_memory() -> None:
    assert machine.judge_shared(64 << 20, 64 << 20).state == "note"
    assert machine.judge_shared(2 << 30, 1 << 20).state == "note"
    assert machine.judge_shared(2 << 30, 2 << 30).state == "ok"


def gpu(**changed: Any) -> dict[str, Any]:
    whole = {
        "name": "X100",
        "memory_bytes": 80 << 30,
        "free_bytes": 79 << 30,
        "capability": "9.0",
        "bf16": True,
    }
    return {**whole, "problem": None, **changed}


@pytest.mark.parametrize(
    ("changed", "state", "says"),
    [
        ({}, "ok", ""),
        ({"gpus": []}, "note", "gloo on the CPU"),
        ({"gpus": [], "torch_cuda": None}, "wrong", "built without CUDA"),
        ({"gpus": [gpu(), gpu(problem="out of memory")]}, "wrong", "GPU 1: out of memory"),
        ({"gpus": [gpu(), gpu(free_bytes=1 << 30)]}, "note", "others use GPU 1"),
        ({"gpus": [gpu(), gpu(name="X10")]}, "note", "slowest kind"),
        ({"gpus": [gpu(bf16=False), gpu(bf16=False)]}, "note", "bf16 is emulated"),
        ({"no_peers": [(0, 1), (1, 0)]}, "note", "2 pairs, as 0 and 1"),
    ],
)
def test_gpus(changed: dict[str, Any], state: str, says: str) -> None:
    facts = {
        "driver": "570.1",
        "torch_cuda": "12.8",
        "visible": None,
        "gpus": [gpu(), gpu()],
        "no_peers": [],
    }
    finding = gpus.gpu_finding({**facts, **changed})
    assert finding.state == state
    assert says in finding.advice


def test_a_name_that_stands_for_a_loopback() -> None:
    assert network.judge_hostname("node", ["10.0.0.7"]).state == "ok"
    assert network.judge_hostname("node", ["10.0.0.7", "127.0.1.1"]).state == "ok"
    assert network.judge_hostname("node", ["127.0.1.1", "::1"]).state == "note"
    assert "no address" in network.judge_hostname("node", []).found


@pytest.mark.parametrize(
    ("name", "value", "state"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", "ok"),
        ("GLOO_SOCKET_IFNAME", "eth", "wrong"),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", "wrong"),
        ("NCCL_SOCKET_IFNAME", "eth", "ok"),
        ("NCCL_SOCKET_IFNAME", "=eth", "wrong"),
        ("NCCL_SOCKET_IFNAME", "=eth0", "ok"),
        ("NCCL_SOCKET_IFNAME", "ib", "wrong"),
        ("NCCL_SOCKET_IFNAME", "^docker", "ok"),
        ("NCCL_SOCKET_IFNAME", "^eth,lo", "wrong"),
        ("http_proxy", "http://10.0.0.1:3128", "ok"),
    ],
)
def test_variables_that_choose_an_interface(name: str, value: str, state: str) -> None:
    finding = network.judge_variables({name: value}, ["lo", "eth0"])
    assert finding.state == state
    assert state == "ok" or "eth0" in finding.advice


def test_a_sum_that_is_wrong_is_said() -> None:
    assert allreduce_check.AllReduceTiming(4, 1000, 0.5, True).bytes_per_s == 3000
    assert (
        allreduce_check.allreduce_finding(
            "gloo", allreduce_check.AllReduceTiming(4, 1000, 0.5, True)
        ).state
        == "ok"
    )
    assert (
        allreduce_check.allreduce_finding(
            "gloo", allreduce_check.AllReduceTiming(4, 1000, 0.5, False)
        ).state
        == "wrong"
    )


# ---- the folder and the run ----------------------------------------------------------------------


def test_a_folder_is_written_read_and_left_as_it_was(tmp_path: Path) -> None:
    finding = folder.folder(tmp_path / "not" / "there")
    assert finding.state == ("note" if finding.facts["kind"] == "tmpfs" else "ok")
    assert finding.facts["folder"] == str(tmp_path)
    assert finding.facts["write_bytes_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_full_or_closed() -> None:
    full = folder.folder_finding(folder.Disk("/data", "nfs4", 1 << 20))
    assert full.state == "wrong"
    assert "it is full" in full.advice
    assert folder.folder(Path("/proc")).state == "wrong"


@pytest.mark.parametrize(
    ("kept", "free", "state"), [(4, 400, "ok"), (4, 399, "wrong"), (0, 100, "note")]
)
def test_room_for_checkpoints(kept: int, free: int, state: str) -> None:
    assert folder.judge_room(parameters=8, each=100, kept=kept, free=free).state == state


@pytest.mark.parametrize(
    ("optimizer", "count"),
    [
        ({"name": "adamw"}, 8),
        ({"name": "sgd"}, 0),
        ({"name": "sgd", "momentum": "0.9"}, 4),
        ({"name": "muon", "adamw": "[]"}, 4),
        ({"name": "adamw8bit"}, 2 + 8 / 128),
        ({"name": "adafactor"}, 4 * (32 + 256) / (32 * 256)),
    ],
)
def test_what_an_optimizer_keeps(run_file: Path, optimizer: dict[str, str], count: float) -> None:
    run = run_config.load_run(
        run_file,
        {f"optimizer.{key}": value for key, value in optimizer.items()} | {"optimizer.lr": "1"},
    )
    assert run_precision(run).state_bytes == count  # of a float32 parameter


def test_room_counts_what_the_run_keeps(run_file: Path, tmp_path: Path) -> None:
    run = run_config.load_run(run_file, {"checkpoint.keep": "5", "checkpoint.keep_every": "2"})
    facts = folder.checkpoint_room(run, tmp_path, doctor_run_check.checkpoint_size).facts
    assert facts["kept"] == 5 + 1 + 10 // 2
    assert facts["checkpoint_bytes"] == 12 * facts["parameters"] > 0


@pytest.mark.parametrize(
    ("axes", "count", "gpus", "state", "says"),
    [
        ("dp4", 2, 0, "ok", "2 on each host, over gloo"),
        ("dp4", 3, 0, "wrong", "3 hosts do not share evenly"),
        ("dp8", 2, 0, "note", "4 on each host"),
        ("dp8", 2, 4, "ok", "a GPU for each"),
        ("dp8", 1, 4, "note", "8 ranks"),
    ],
)
def test_a_layout_on_hosts(axes: str, count: int, gpus: int, state: str, says: str) -> None:
    hosts = [host(str(i), cores={"usable": 2}, gpus={"gpus": [gpu()] * gpus}) for i in range(count)]
    finding = layout_fit.check_layout_fits(axes, hosts)
    assert finding.state == state
    assert says in finding.found


@pytest.mark.parametrize(
    ("backend", "gpus", "state", "says"),
    [
        ("gloo", 4, "ok", "over gloo on the CPU"),
        ("nccl", 4, "ok", "a GPU for each"),
        ("nccl", 1, "wrong", "train.backend = 'nccl' takes a GPU for each rank of a host: it has"),
        ("auto", 1, "note", "2 ranks"),
    ],
)
def test_a_layout_by_the_backend_that_is_asked_for(
    backend: Any, gpus: int, state: str, says: str
) -> None:
    hosts = [host("0", cores={"usable": 2}, gpus={"gpus": [gpu()] * gpus})]
    finding = layout_fit.check_layout_fits("dp2", hosts, backend=backend)
    assert finding.state == state and says in finding.found


def test_workers_on_hosts() -> None:
    hosts = [host(str(i), cores={"usable": 2}, gpus={"gpus": [gpu()] * 4}) for i in range(3)]
    several = layout_fit.check_layout_fits("dp1", hosts, 2)
    assert several.state == "wrong" and several.advice.startswith("use one host")
    assert layout_fit.check_layout_fits("dp1", hosts, 3).state == "wrong"
    alone = [host("0", cores={"usable": 4})]
    assert (
        layout_fit.check_layout_fits("dp1", alone, 2).found
        == "the driver with its workers has 3 ranks, over gloo on the CPU"
    )
    assert "3 ranks share 2 cores" in layout_fit.check_layout_fits("dp1", hosts[:1], 2).advice


# ---- several hosts -------------------------------------------------------------------------------


def versions(**changed: str) -> dict[str, Any]:
    return {
        "python": "3.11.7",
        "torch": "2.13.0",
        "weft": "0.1.0",
        "cuda": None,
        "nccl": None,
        **changed,
    }


@pytest.mark.parametrize(
    ("changed", "state", "says"),
    [
        ({}, "ok", "all 3"),
        ({"python": "3.11.2"}, "ok", "all 3"),
        ({"python": "3.12.1"}, "note", "python 3.11 on a, c, 3.12 on b"),
        ({"torch": "2.12.1"}, "wrong", "torch 2.13.0 on a, c, 2.12.1 on b"),
        (
            {"weft": "0.2.0", "nccl": "2.27"},
            "wrong",
            "weft 0.1.0 on a, c, 0.2.0 on b; nccl none on a, c, 2.27 on b",
        ),
    ],
)
def test_versions_that_disagree(changed: dict[str, str], state: str, says: str) -> None:
    hosts = [
        host("a", versions=versions()),
        host("b", versions=versions(**changed)),
        host("c", versions=versions()),
    ]
    finding = compare_hosts.versions(hosts)
    assert finding.state == state
    assert says in finding.found


def test_gpus_that_are_unlike() -> None:
    some, none = host("a", gpus={"gpus": [gpu(), gpu()]}), host("b", gpus={"gpus": []})
    assert compare_hosts.gpus([none, none]) is None
    alone = compare_hosts.gpus([some, some])
    assert alone is not None
    assert alone.state == "ok"
    unlike = compare_hosts.gpus([some, none])
    assert unlike is not None
    assert (unlike.state, unlike.found) == ("note", "2 x X100 on a; none on b")


def test_the_offset_of_a_clock_is_that_of_the_fastest_trip() -> None:
    trips = [(100.0, 97.0, 110.0), (120.0, 118.03, 120.1), (130.0, 121.0, 138.0)]
    ahead, unsure = clocks.offset(trips)
    assert ahead == pytest.approx(2.02)
    assert unsure == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("ahead", "unsure", "state"),
    [
        (0.04, 0.001, "ok"),
        (-0.2, 0.001, "note"),
        (0.2, 0.19, "ok"),
        (-1.5, 0.1, "wrong"),
        (1.05, 0.1, "note"),
    ],
)
def test_clocks_that_differ(ahead: float, unsure: float, state: str) -> None:
    finding = clocks.clocks_finding({"a": (0.0, 0.0), "b": (ahead, unsure)})
    assert finding.state == state
    assert state == "ok" or finding.advice.endswith("on b")
    assert state == "ok" or ("behind a" in finding.found) == (ahead < 0)


def test_a_host_that_is_not_reached_is_named() -> None:
    assert ports.ports_finding({"a": {}, "b": {}}).state == "ok"
    finding = ports.ports_finding({"a": {"c": "timed out"}, "b": {"c": "timed out"}, "c": {}})
    assert finding.state == "wrong"
    assert finding.found == "a does not reach c (timed out), and so 1 more, all from or to c"


def test_a_port_that_nobody_opened() -> None:
    with network.listening("127.0.0.1") as server:
        port = server.getsockname()[1]
        assert ports._problem("127.0.0.1", port) is None
    assert "refused" in str(ports._problem("127.0.0.1", port))


def test_links() -> None:
    fast, slow = links.Link("a", "b", 1e-4, 1e9), links.Link("b", "c", 2e-3, 1e8)
    assert links.links_finding([fast, fast], right=True).state == "ok"
    assert links.links_finding([fast, fast], right=False).state == "wrong"
    finding = links.links_finding([fast, fast, slow], right=True)
    assert finding.state == "note"
    assert "b - c sets the pace" in finding.advice
    assert "farthest b - c, 2 ms" in finding.found
    assert "docs/sync.md" in links.links_finding([slow, slow], right=True).advice
    assert links.pairs(3) == [(0, 1), (0, 2), (1, 2)]
    assert len(links.pairs(8)) == 28
    assert links.pairs(9)[-1] == (8, 0)


def test_a_folder_that_is_not_shared() -> None:
    assert (
        shared_folder.shared_folder_finding("/data", {"a": ([], 0.0), "b": ([], 0.3)}).state == "ok"
    )
    assert (
        shared_folder.shared_folder_finding("/data", {"a": ([], 0.0), "b": ([], 5.0)}).state
        == "note"
    )
    assert (
        shared_folder.shared_folder_finding("/data", {"a": ([], 0.0), "b": ([], None)}).state
        == "wrong"
    )
    finding = shared_folder.shared_folder_finding("/data", {"a": (["b"], 0.0), "b": (["a"], None)})
    assert (finding.state, finding.found) == ("wrong", "a does not see in /data what b wrote")


# ---- what is printed -----------------------------------------------------------------------------


def test_what_hosts_have_alike_is_printed_once() -> None:
    fine, bad = Finding("cores", "ok", "2"), Finding("cores", "note", "1")
    hosts = [Host("a", "", (fine,)), Host("b", "", (bad,)), Host("c", "", (fine,))]
    assert report.finding_rows(HostReport(hosts, [])) == [("a, c", fine), ("b", bad)]
    assert report.finding_rows(HostReport(hosts[::2], [bad])) == [("all", fine), ("", bad)]
    assert report.finding_rows(HostReport(hosts[:1], [])) == [("", fine)]


def test_the_verdict() -> None:
    hosts = [host(name, cores={"usable": 4, "fast": ["bf16"]}, gpus={"gpus": []}) for name in "ab"]
    lines = report.verdict(hosts, [Finding("ports", "ok", "")])
    assert lines[0].startswith("layouts of up to 8 ranks at full speed")
    assert lines[1] == "fp32, fp64, bf16; fp16 emulated, no faster than fp32"
    assert "runs over these 2 hosts" in lines[2]
    lines = report.verdict(hosts, [Finding("ports", "wrong", "")])
    assert lines[0].startswith("on each host by itself: layouts of up to 4 ranks")
    assert lines[-1] == "wrong: ports"
    lines = report.verdict([host("a", gpus={"gpus": [gpu()] * 2})], [])
    assert lines[:2] == [
        "layouts of up to 2 ranks, a GPU each, over NCCL",
        "fp32, fp64, bf16, fp16",
    ]


# ---- the command ---------------------------------------------------------------------------------


def environment(tmp_path: Path) -> dict[str, str]:
    """With a folder of its own for temporary files, but for torch's cache."""
    (tmp_path / "tmp").mkdir()
    return {
        **os.environ,
        "TMPDIR": str(tmp_path / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"),
    }


def doctor(tmp_path: Path, *args: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "weft", "doctor", *map(str, args)]
    return subprocess.run(
        line, env=environment(tmp_path), capture_output=True, text=True, timeout=120
    )


def test_alone_with_a_run(tmp_path: Path, run_file: Path) -> None:
    found = doctor(tmp_path, run_file)
    assert found.returncode == 0, found.stdout + found.stderr
    for line in ("versions", "cores", "gpus", "gloo", "folder", "run file", "room", "layout"):
        assert f" {line} " in found.stdout
    assert "this run: dp2 has 2 ranks" in found.stdout
    assert found.stdout.splitlines()[-1] == "nothing is wrong"
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not (tmp_path / "out").exists()


def test_what_is_wrong_ends_with_1_and_is_in_the_object(tmp_path: Path, run_file: Path) -> None:
    run_file.write_text(run_file.read_text().replace('"dp2"', '"tp3"'))
    found = doctor(tmp_path, run_file, "--folder", "/proc", "--json")
    assert found.returncode == 1
    said = json.loads(found.stdout)
    assert said["passed"] is False
    assert said["verdict"][-1] == "wrong: folder, run file, room"
    states = {finding["name"]: finding for finding in said["hosts"][0]["findings"]}
    assert "tp3" in states["run file"]["found"]
    assert states["gloo"]["facts"]["ranks"] == 2


@pytest.mark.parametrize(
    "args",
    [
        "--nodes 3",
        "--rdzv a:1",
        "--nodes 0 --rdzv a:1",
        "--nodes 2 --rdzv a:b",
        "--layout dp2",
        "--set train.steps=3",
    ],
)
def test_what_cannot_be_asked(args: str) -> None:
    found = CliRunner().invoke(app, ["doctor", *args.split()])
    assert (found.exit_code, found.stdout) == (2, "")


def test_a_run_is_checked_as_it_is_overridden(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layout, its keys, and the folder that it then writes to."""
    seen: list[checks.DoctorRequest] = []

    def keep(request: checks.DoctorRequest, as_json: bool) -> bool:
        seen.append(request)
        return True

    # weft.launch is also a function, by which the package cannot be reached
    monkeypatch.setattr(sys.modules["weft.launch"], "report_doctor", keep)
    options = ("--layout", "tp2", "--set", "train.steps=77", "--set", f"output={tmp_path / 'o'}")
    found = CliRunner().invoke(app, ["doctor", str(run_file), *options])
    assert found.exit_code == 0, found.output
    run = seen[0].run()
    assert run is not None and (str(run.layout.axes), run.train.steps) == ("tp2", 77)
    assert seen[0].place() == tmp_path / "o"
    (check,) = [each for each in checks.host_checks(seen[0]) if each[0] == "run file"]
    sound = checks.run_check(check)
    assert sound is not None and sound.facts == {"layout": "tp2", "world": 2}
    CliRunner().invoke(app, ["doctor", str(run_file), "--layout", "tp3"])
    (check,) = [each for each in checks.host_checks(seen[1]) if each[0] == "run file"]
    wrong = checks.run_check(check)
    assert wrong is not None and wrong.state == "wrong" and "tp3" in wrong.found


def with_folder(folder: Path) -> list[int]:
    """The processes whose temporary files are there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"TMPDIR={folder}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_one_that_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    own = environment(tmp_path)
    slow = (
        "import time\nfrom weft.launch.doctor import folder\nfolder._read = lambda file:"
        " time.sleep(100)\nimport sys, signal\nfrom weft.cli.app import"
        " main\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nsys.argv = ['weft',"
        f" 'doctor', '--folder', {str(tmp_path / 'tmp')!r}]\nmain()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow], env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while not list(
        (tmp_path / "tmp").glob(".weft-doctor-*")
    ):  # it stands in the check of the folder
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    process.wait(10)
    while with_folder(tmp_path / "tmp"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert list((tmp_path / "tmp").iterdir()) == []


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def seen(asked: DoctorRequest, change: Callable[[], None], file: Path) -> None:
    change()
    file.write_bytes(pickle.dumps(checks.check_with_others(asked)))


def met(
    folder: Path, count: int, meeting: Rendezvous, *changes: Callable[[], None], apart: bool = False
) -> list[HostReport]:
    """What each host that is started sees; each is a process in which something may be changed
    first. `apart`: each has a folder of its own."""
    places = [folder / f"of-{n}" if apart else folder for n in range(len(changes))]
    for place in places:
        place.mkdir(exist_ok=True)
    asked = [
        DoctorRequest("0.1.0", folder=place, hosts=(count, count), meeting=meeting)
        for place in places
    ]
    start, files = (
        multiprocessing.get_context("fork").Process,
        [folder / f"{n}.pickle" for n in range(len(changes))],
    )
    hosts = [start(target=seen, args=each) for each in zip(asked, changes, files, strict=True)]
    for each in hosts:
        each.start()
    for each in hosts:
        each.join(200)
    assert [each.exitcode for each in hosts] == [0] * len(hosts)
    return [pickle.loads(file.read_bytes()) for file in files]


def findings(looked: HostReport) -> dict[str, Finding]:
    return {finding.name: finding for finding in looked.between}


def nothing() -> None:
    pass


def an_hour_ahead() -> None:
    checks.clocks.clocks = partial(clocks.clocks, clock=lambda: time.time() + 3600)  # type: ignore[assignment]


def another_weft() -> None:
    true = machine.version_finding
    checks.machine.version_finding = lambda weft: true("0.0.9")  # type: ignore[assignment]


@pytest.mark.parametrize("how", ["port", "file"])
def test_three_hosts(tmp_path: Path, how: str) -> None:
    file = str(tmp_path / "meeting")
    meeting = Rendezvous("127.0.0.1", free_port()) if how == "port" else Rendezvous(file=file)
    everyone = met(tmp_path, 3, meeting, nothing, nothing, nothing)
    assert sorted(each.place.number for each in everyone if each.place) == [0, 1, 2]
    assert [each.passed for each in everyone] == [True] * 3, [each.between for each in everyone]
    first = next(each for each in everyone if each.place and each.place.number == 0)
    assert len(first.hosts) == 3
    names = ["hosts", "same versions", "clocks", "ports", "links", "shared folder"]
    assert [finding.name for finding in first.between] == names
    assert len(findings(first)["links"].facts["links"]) == 3
    assert len(findings(first)["clocks"].facts["offset_s"]) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{n}.pickle" for n in range(3)]


def test_hosts_that_are_not_alike(tmp_path: Path) -> None:
    meeting = Rendezvous("127.0.0.1", free_port())
    everyone = met(tmp_path, 3, meeting, nothing, an_hour_ahead, another_weft)
    assert [each.passed for each in everyone] == [False] * 3
    first = next(each for each in everyone if each.place and each.place.number == 0)
    offsets = findings(first)["clocks"].facts["offset_s"].values()
    assert max(map(abs, offsets)) == pytest.approx(3600, abs=1)
    states = {name: finding.state for name, finding in findings(first).items()}
    assert (states["clocks"], states["same versions"], states["ports"]) == ("wrong", "wrong", "ok")


def test_a_folder_of_its_own_on_each_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "PATIENCE_S", 1.0)
    everyone = met(tmp_path, 2, Rendezvous("127.0.0.1", free_port()), nothing, nothing, apart=True)
    first = next(each for each in everyone if each.place and each.place.number == 0)
    finding = findings(first)["shared folder"]
    assert finding.state == "wrong"
    assert sorted(finding.facts["unseen"]) == sorted(each.name for each in first.hosts)
    assert [list((tmp_path / f"of-{n}").iterdir()) for n in range(2)] == [[], []]


def test_a_store_that_goes(tmp_path: Path) -> None:
    def ends() -> None:
        checks.check_host = lambda asked: os._exit(9)  # type: ignore[assignment]

    first, second = met(
        tmp_path, 2, Rendezvous("127.0.0.1", free_port()), ends, partial(time.sleep, 1.0)
    )
    assert findings(first)["meeting"].found == "exited with code 9"
    assert findings(second)["meeting"].state == "wrong"
    assert not second.passed
    assert len(second.hosts[0].findings) > 8  # what it found on itself is there all the same


def test_a_host_that_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rendezvous, "JOIN_S", 4.0)
    everyone = met(tmp_path, 3, Rendezvous("127.0.0.1", free_port()), nothing, nothing)
    assert [each.passed for each in everyone] == [False] * 2
    first = next(each for each in everyone if each.place and each.place.number == 0)
    assert findings(first)["hosts"].found.startswith("2 of 3 came: ")
    assert findings(first)["ports"].state == "ok"


def test_all_hosts_end_with_what_the_first_found(tmp_path: Path) -> None:
    def odd() -> None:
        checks.compare_findings = lambda asked, hosts: [Finding("odd", "wrong", "")]  # type: ignore[assignment]

    _, second = met(
        tmp_path, 2, Rendezvous("127.0.0.1", free_port()), odd, partial(time.sleep, 1.0)
    )
    assert "odd" not in findings(second)
    assert not second.passed


@pytest.mark.slow
def test_a_host_that_comes_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow() -> None:
        checks.check_host = lambda asked: iter([time.sleep(8)][:0])  # type: ignore[assignment]

    monkeypatch.setattr(host_rendezvous, "JOIN_S", 2.0)
    _, late = met(tmp_path, 2, Rendezvous("127.0.0.1", free_port()), slow, partial(time.sleep, 5.0))
    assert "did not wait for this host" in findings(late)["meeting"].found


def test_one_host_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rendezvous, "JOIN_S", 10.0)
    everyone = met(tmp_path, 2, Rendezvous("127.0.0.1", free_port()), nothing, nothing, nothing)
    assert sorted(each.passed for each in everyone) == [False, True, True]
    left = next(each for each in everyone if each.place is None)
    assert "2 hosts are there already" in findings(left)["meeting"].found
    assert left.hosts[0].findings


def test_where_something_else_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rendezvous, "JOIN_S", 2.0)
    monkeypatch.setattr(host_rendezvous, "ANSWER_S", 2.0)
    with network.listening("127.0.0.1") as taken:
        [alone] = met(tmp_path, 2, Rendezvous("127.0.0.1", taken.getsockname()[1]), nothing)
    assert "nobody answers" in findings(alone)["meeting"].found
    assert len(alone.hosts[0].findings) > 8  # its own are there all the same
