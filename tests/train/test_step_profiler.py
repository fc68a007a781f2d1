"""`train.profile`: the trace of all ranks, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.run_files import TINY
from tests.train.test_trainer import make
from weft.cli.app import app
from weft.core.errors import ConfigError
from weft.launch.local_workers import Pool
from weft.train.overlap.profiled_step import read_profile, total_s
from weft.train.step_profiler import rank_events, read_zero_s
from weft.train.trainer import train


def traced(path: Path) -> list[dict[str, Any]]:
    trace = json.loads((path / "profile.json").read_text())
    found: list[dict[str, Any]] = trace["traceEvents"]
    return found


@pytest.mark.parametrize(
    ("axes", "actions", "messages"),
    [
        ("dp2", "FBFB", {"all_reduce over dp"}),
        ("tp2", "FBFB", {"all_reduce over tp"}),
        ("pp2", "FFBB", {"send over pp", "recv over pp"}),
        ("fsdp2", "FBFB", {"all_gather over fsdp"}),
    ],
)
def test_the_trace_has_all_ranks_and_their_communication(
    tmp_path: Path, pool: Pool, axes: str, actions: str, messages: set[str]
) -> None:
    run = make(tmp_path, axes, train__profile="3-4")
    pool.run(train, run, False, world=2)
    events = traced(Path(run.output))
    assert not [*Path(run.output).glob(".profile*")]  # the ranks' own parts
    assert {event["pid"] for event in events} == {0, 1}
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert names == {(0, "rank 0"), (1, "rank 1")}
    for rank in (0, 1):
        own = [event for event in events if event["pid"] == rank]
        assert [e["name"] for e in own if e["name"].startswith("step ")] == ["step 3", "step 4"]
        stages = [e for e in own if e.get("cat") == "stages"]
        found = [e["args"]["kind"] for e in stages if e["name"] != "recv-wait"]
        expected = actions if axes != "pp2" or rank == 0 else "FBFB"
        assert "".join(found) == expected * 2
        ends = Counter(e["id"] for e in own if e.get("cat") == "communication")
        assert ends and set(ends.values()) == {2}  # a begin and an end
        begun = {e["name"] for e in own if e.get("cat") == "communication" and e["ph"] == "b"}
        assert messages <= begun, begun
        assert all(e["ts"] >= 0 for e in own if "ts" in e and e.get("cat") != "stages")
    read = read_profile(Path(run.output) / "profile.json")
    assert (read.number, len(read.ranks)) == (4, 2)
    for own_times in read.ranks:
        assert 0 < total_s(own_times.computing) < read.stop_s
        for label, spans in own_times.comms.items():
            assert 0 <= own_times.overlapped_s(label) <= own_times.comm_s(label) <= read.stop_s
            assert own_times.comm_s(label) <= total_s(spans) + 1e-9
    assert messages <= {label for own_times in read.ranks for label in own_times.comms}
    arrows = [e["id"] for e in events if e["ph"] == "s"]
    assert len(arrows) == len(set(arrows))


def _holds(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    return bool(outer["ts"] < inner["ts"] < outer["ts"] + outer["dur"])


def test_gradients_are_summed_while_backward_runs(tmp_path: Path, pool: Pool) -> None:
    run = make(tmp_path, "dp2", train__profile="4")
    pool.run(train, run, False, world=2)
    for rank in (0, 1):
        own = [event for event in traced(Path(run.output)) if event["pid"] == rank]
        [last] = [e for e in own if e.get("cat") == "stages" and e["name"] == "0B1"]
        calls = [e for e in own if e["name"] == "comm: allreduce over dp"]
        backward = [e for e in own if e["name"].startswith("autograd::engine")]
        within = [e for e in calls for b in (last, *backward) if _holds(b, e)]
        assert max(Counter(e["ts"] for e in within).values()) > 1  # in 0B1, and in autograd


def test_a_run_without_other_ranks_is_profiled_too(tmp_path: Path) -> None:
    run = make(tmp_path, train__profile="2")
    train(run, False)
    assert {event["pid"] for event in traced(Path(run.output))} == {0}


@pytest.mark.parametrize("value", ["", "0", "5-3", "2-x", "-3", "all"])
def test_what_are_no_steps_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"is neither one step nor a range") as caught:
        make(tmp_path, train__profile=value)
    assert caught.value.field == "train.profile"


def test_steps_that_never_come_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"goes beyond the last step. Name steps up to 6"):
        make(tmp_path, train__profile="5-7")


def test_a_profile_and_a_trace_do_not_go_together(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TINY)
    given = [str(tmp_path / "run.toml"), "--trace", "--set", 'train.profile="1"']
    result = CliRunner().invoke(app, ["train", *given])
    assert result.exit_code == 2
    assert "--trace = True: --trace and train.profile both record the stages" in result.output


def span(name: str, start: float, length: float, thread: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": 7, "tid": thread, "ts": start, "dur": length}


@pytest.mark.parametrize(("begins", "named"), [(3, "all_reduce over dp"), (9, "all_reduce")])
def test_work_that_begins_after_its_call_is_of_that_call(begins: float, named: str) -> None:
    """As where a machine has no core for gloo's threads. After the step it may be anything."""
    events = [
        span("weft: all ranks begin", 0, 0.5),
        span("step 3", 1, 7),
        span("comm: allreduce over dp", 2, 0.5),
        span("gloo:all_reduce", begins, 1, thread=2),
    ]
    found = rank_events(0, {"traceEvents": events}, [], 0.0)
    assert {e["name"] for e in found if e.get("cat") == "communication"} == {named}


def test_the_clock_is_that_of_the_shortest_read() -> None:
    """A process that the system stops between two lines reads the two clocks at other times."""
    trace = {"traceEvents": [span("weft: clock", ts, 1) for ts in (5000, 1000, 9000)]}
    trace["traceEvents"].append(span("weft: all ranks begin", 10_000, 1))
    reads = [(0.001, 0.001002), (0.003, 0.005002), (0.0051, 0.009)]  # the first read is at 1000
    assert read_zero_s(trace, reads) == pytest.approx(0.010001)
