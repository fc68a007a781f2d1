"""What overlaps in a profiled step: times, shares, pictures, and what is no profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from tests.pipeline.test_draw import SVG
from weft.cli.app import app
from weft.train.overlap.profiled_step import ProfiledRank, own_tracks, read_profile
from weft.train.overlap.svg import EXPOSED, OVERLAPPED, overlap_svg
from weft.train.overlap.text import overlap_text
from weft.train.step_profiler import rank_events

Event = dict[str, Any]


def span(cat: str, name: str, rank: int, start_s: float, stop_s: float, **args: Any) -> Event:
    times = {"ts": start_s * 1e6, "dur": (stop_s - start_s) * 1e6}
    return {"ph": "X", "cat": cat, "name": name, "pid": rank, "tid": cat, "args": args} | times


def message(rank: int, number: int, start_s: float, stop_s: float, over: str = "dp") -> list[Event]:
    common = {"cat": "communication", "name": f"all_reduce over {over}", "pid": rank}
    ends = (("b", start_s), ("e", stop_s))
    return [{**common, "id": f"{rank}.c{number}", "ph": p, "ts": t * 1e6} for p, t in ends]


def step(rank: int, at_s: float, number: int) -> list[Event]:
    """Ten seconds: forward 0 to 3, backward 3 to 8 with a wait from 5 to 6; messages 4 to 7 and 5
    to 9.5, of which 4 to 5 and 6 to 8 are beside computing."""
    return [
        span("user_annotation", f"step {number}", rank, at_s, at_s + 10),
        span("stages", "0F0", rank, at_s, at_s + 3, kind="F", stage=0, microbatch=0),
        span("stages", "0B0", rank, at_s + 3, at_s + 8, kind="B", stage=0, microbatch=0),
        span("computes", "computes", rank, at_s, at_s + 5),
        span("computes", "computes", rank, at_s + 6, at_s + 8),
        span("cpu_op", "aten::mm", rank, at_s, at_s + 5),
        *message(rank, 10 * int(at_s), at_s + 4, at_s + 7),
        *message(rank, 10 * int(at_s) + 1, at_s + 5, at_s + 9.5),
    ]


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Two ranks, two steps; rank 1 is a second late."""
    events = [*step(0, 100, 3), *step(1, 101, 3), *step(0, 200, 4), *step(1, 200, 4)]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_the_last_step_is_read_and_its_share(profile: Path) -> None:
    read = read_profile(profile)
    assert (read.number, len(read.ranks), read.stop_s) == (4, 2, 10)
    for rank in read.ranks:
        assert rank.actions == (("F", 0, 3), ("B", 3, 8))
        assert rank.computing == ((0, 5), (6, 8))
        assert rank.comms == {"all_reduce over dp": ((4, 7), (5, 9.5))}
        assert rank.comm_s("all_reduce over dp") == 5.5  # two at once count once
        assert rank.overlapped_s("all_reduce over dp") == 3
        assert rank.pieces == (("F", 0, 3), ("B", 3, 5), ("B", 6, 8))


def test_a_step_begins_with_its_first_rank(profile: Path) -> None:
    events = json.loads(profile.read_text())["traceEvents"]
    earlier = [e for e in events if not str(e["name"]).startswith("step 4")]
    profile.write_text(json.dumps({"traceEvents": earlier}))
    read = read_profile(profile)
    assert (read.number, read.stop_s) == (3, 11)
    assert [rank.computing[0][0] for rank in read.ranks] == [0, 1]
    assert all(stop <= 11 for rank in read.ranks for _, stop in rank.computing)


def test_what_is_drawn_alone_is_the_same_picture(profile: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    result = run("--profile", str(profile), "--out", str(kept))
    assert result.exit_code == 0, result.output
    assert {e.get("cat") for e in own_tracks(kept)} == {
        "stages",
        "computes",
        "communication",
        "user_annotation",
    }
    assert overlap_svg(read_profile(kept)) == overlap_svg(read_profile(profile))


def test_text(profile: Path) -> None:
    said = [
        line.rstrip() for line in overlap_text(read_profile(profile), width=71).plain.split("\n")
    ]
    assert said[:5] == [
        "step 4, 2 ranks: 10 s",
        "",
        "rank 0               FFFFFFFFFFFFFFFBBBBBBBBBB     BBBBBBBBBB",
        "  all_reduce over dp                     #####-----##########--------",
        "                     2 x all_reduce over dp: 5.5 s, overlapped 54.5 %",
    ]


def test_svg_is_dark_where_communication_is_beside_computing(profile: Path) -> None:
    root = ElementTree.fromstring(overlap_svg(read_profile(profile)))
    rects = [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]

    def spans(paint: str) -> list[tuple[float, float]]:
        found = [r for r in rects if r.get("fill") == paint]
        ends = [(float(r.get("x", 0)), float(r.get("width", 0))) for r in found]
        return [(round((x - left) / 76, 2), round((x + w - left) / 76, 2)) for x, w in ends]

    left = min(float(rect.get("x", 0)) for rect in rects)
    assert spans(OVERLAPPED) == [(4, 5), (6, 7), (6, 8)] * 2
    assert spans(EXPOSED) == [(4, 7), (5, 9.5)] * 2
    words = [node.text or "" for node in root.iter(f"{SVG}text")]
    assert words.count("2 x all_reduce over dp: 5.5 s, overlapped 54.5 %") == 2


def test_the_command(profile: Path, tmp_path: Path) -> None:
    assert "overlapped 54.5 %" in run("--profile", str(profile)).output
    figures = json.loads(run("--profile", str(profile), "--json").output)
    assert figures["ranks"][1]["all_reduce over dp"] == {
        "count": 2,
        "seconds": 5.5,
        "overlapped_s": 3.0,
    }
    image = tmp_path / "x.svg"
    assert run("--profile", str(profile), "--out", str(image)).exit_code == 0
    ElementTree.fromstring(image.read_text())
    other = tmp_path / "trace.json"
    for content, message in (
        ("{", "is not a profile of a run (JSONDecodeError"),
        ("[1]", "is not a profile of a run (TypeError"),
        ('{"traceEvents": [3]}', "is not a profile of a run (AttributeError"),
        ('{"traceEvents": []}', "has no steps in which a rank computes"),
    ):
        other.write_text(content)
        refused = run("--profile", str(other))
        assert refused.exit_code == 2 and message in " ".join(refused.output.split())
    for args, message in (
        (["--profile", str(tmp_path / "none.json")], "cannot be read"),
        (["--profile", str(profile), "--out", "x.csv"], "Name a .svg or a .json"),
        (
            ["--profile", str(profile), "--layout", "tp2"],
            "--layout = 'tp2': applies only to --plan",
        ),
        (["--profile", str(profile), "--plan", "run.toml"], "cannot be drawn together with --plan"),
    ):
        refused = run(*args)
        assert refused.exit_code == 2 and message in " ".join(refused.output.split())


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["draw", *args], env={"NO_COLOR": "1", "FORCE_COLOR": None})


def operator(name: str, start_us: float, stop_us: float, **more: Any) -> Event:
    return {
        "ph": "X",
        "name": name,
        "pid": 7,
        "tid": 1,
        "ts": start_us,
        "dur": stop_us - start_us,
    } | more


def computing(*events: Event) -> list[tuple[float, float]]:
    begun = operator("weft: all ranks begin", 0, 0.5)
    found = rank_events(0, {"traceEvents": [begun, *events]}, [], 0.0)
    own = [e for e in found if e.get("cat") == "computes"]
    return [(e["ts"], e["ts"] + e["dur"]) for e in own]


def test_operators_compute_and_waits_do_not() -> None:
    """A gap between operators is Python's; a longer one a wait, and so is a collective."""
    assert computing(
        operator("aten::linear", 10, 50),
        operator("aten::mm", 20, 40),
        operator("aten::add", 140, 200),  # 90 us later
        operator("c10d::allreduce_", 200, 900),
        operator("aten::mul", 1000, 1010),
    ) == [(10, 200), (1000, 1010)]


def test_on_a_gpu_kernels_compute() -> None:
    kernel = {"cat": "kernel", "args": {"correlation": 1}}
    assert computing(
        operator("aten::mm", 10, 30),
        operator("sm90_gemm", 500, 900, **kernel),
        operator("ncclDevKernel_AllReduce", 1200, 1900, **kernel),
    ) == [(500, 900)]


def test_a_rank_without_actions_has_pieces_of_no_kind() -> None:
    rank = ProfiledRank((), ((1.0, 2.0),), {})
    assert rank.pieces == (("", 1.0, 2.0),)
