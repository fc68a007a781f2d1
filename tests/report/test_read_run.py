"""A run folder is read whatever is in it, and what cannot be read is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.report.folders import make_run
from tests.train.test_overlap import message, step
from weft.core import ConfigError
from weft.report import read_run, run_page
from weft.report.sections.memory import measured, predicted
from weft.report.texts import number, text


def sections(folder: Path) -> dict[str, list[dict]]:
    page = run_page([read_run(folder)])
    return {section["id"]: section["blocks"] for section in page["sections"]}


def test_everything_that_a_run_left_has_a_section(tmp_path: Path) -> None:
    found = sections(make_run(tmp_path))
    assert list(found) == [
        "summary",
        "loss",
        "pace",
        "memory",
        "layout",
        "stages",
        "traffic",
        "experts",
        "faults",
        "verify",
        "settings",
    ]
    kinds = {key: {block["kind"] for block in blocks} for key, blocks in found.items()}
    assert kinds["memory"] == {"bars", "table", "lines"} and kinds["layout"] == {"ranks", "heat"}
    assert "timeline" in kinds["stages"] and "heat" in kinds["experts"]


def test_figures_are_those_of_the_folder(tmp_path: Path) -> None:
    found = sections(make_run(tmp_path))
    loss = found["loss"][0]
    assert loss["series"][0]["y"][-1] == pytest.approx(5.0 / 40 + 1.0)
    assert loss["series"][1]["x"] == [20, 40] and loss["marks"][0][0] == 10
    bars = next(block for block in found["memory"] if block["kind"] == "bars")
    parts = {part["name"]["t"]: part["values"] for part in bars["parts"]}
    assert parts["memory.weights"] == [1200.0] * 5 and parts["memory.activations"][0] == 9000.0
    assert parts["memory.activations"][1] == 30_000 - 1200 - 1200 - 2400 - 5000
    held = next(block for block in found["layout"] if block["kind"] == "heat")
    assert held["values"] == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    sent = next(block for block in found["traffic"] if block["kind"] == "bars")
    assert sent["groups"] == ["dp", "pp"]
    assert [part["values"] for part in sent["parts"]] == [[1248.0, 8000.0], [1248.0, 9000.0]]
    load = found["experts"][0]
    assert load["values"][0] == pytest.approx([30 / 32, 50 / 32, 20 / 32, 28 / 32])
    drawn = next(block for block in found["stages"] if block["kind"] == "timeline")
    assert len(drawn["lanes"]) == 4 and len(drawn["spans"]) == 2 * (8 + 2)
    tiles = {name["t"]: value for name, value, _ in found["summary"][0]["rows"]}
    assert tiles["summary.verified"] == {"t": "verified.other"}
    assert tiles["summary.state"] == {"t": "state.finished"}
    assert tiles["summary.restarts"] == {"n": 1, "u": ""}
    changed = next(block for block in found["verify"] if block["kind"] == "note")
    assert "model.dim" in changed["text"]["p"]["keys"]


def test_how_much_of_each_communication_is_beside_computing(tmp_path: Path) -> None:
    """Of the last profiled step, by axis; without a profile nothing is said."""
    events = [
        *step(0, 0, 6),
        *step(0, 20, 7),
        *step(1, 20, 7),
        *message(0, 90, 20, 22, over="tp"),  # all of it beside computing
        *message(1, 90, 25, 26, over="tp"),  # none
    ]
    sent = {"cat": "communication", "name": "send over tp", "pid": 0, "id": "0.s"}
    events += [sent | {"ph": "b", "ts": 20.5e6}, sent | {"ph": "e", "ts": 21.5e6}]
    folder = make_run(tmp_path, profile=json.dumps({"traceEvents": events}))
    bars, table = sections(folder)["traffic"][-2:]
    assert bars["title"] == text("traffic.profile", step=number(7))
    assert bars["groups"] == ["dp", "tp"]
    assert [part["values"] for part in bars["parts"]] == [[3.0, 1.0], [2.5, 0.5]]
    assert table["rows"] == [
        ["all_reduce", "dp", number(2), number(5.5, "s"), number(3.0 / 5.5, "share")],
        ["all_reduce", "tp", number(1), number(1.5, "s"), number(1.0 / 1.5, "share")],
        ["send", "tp", number(1), number(0.5, "s"), number(1.0, "share")],
        [text("traffic.all_kinds"), "tp", number(2), number(1.5, "s"), number(2 / 3, "share")],
    ]
    without = sections(make_run(tmp_path, "without", profile=None))["traffic"]
    assert "traffic.profile" not in json.dumps(without)


def test_the_parts_of_a_prediction_are_the_planners() -> None:
    """A part that no group names would be drawn as activations."""
    from weft.planner.cost.breakdown import MemoryPart
    from weft.report.sections.memory import GROUPS
    from weft.report.texts import load_texts

    named = {part for parts in GROUPS.values() for part in parts}
    assert {str(part) for part in MemoryPart} <= named
    assert {f"part.{part}" for part in named} <= load_texts().keys()


@pytest.mark.parametrize(
    ("events", "state"),
    [
        (["started"], "unfinished"),
        (["started", "died"], "unfinished"),
        (["started", "died", "resumed", "finished"], "finished"),
        (["started", "failed"], "failed"),
        (["started", "stopped"], "stopped"),
        (["started", "stopped", "resumed"], "unfinished"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, events: list[str], state: str) -> None:
    text = "".join(json.dumps({"time": 1, "event": event}) + "\n" for event in events)
    rows = sections(make_run(tmp_path, events=text))["summary"][0]["rows"]
    assert rows[0][1] == {"t": f"state.{state}"}


def test_a_run_of_before_and_one_that_has_just_begun(tmp_path: Path) -> None:
    """They lack files, and a line may be half written."""
    names = ("events", "ranks", "prediction", "verify", "trace", "plan")
    found = sections(make_run(tmp_path, "old", **dict.fromkeys(names)))
    assert "loss" in found and found["faults"][0]["text"] == {"t": "faults.unrecorded"}
    rows = found["summary"][0]["rows"]
    assert rows[0][1] == {"t": "state.finished"} and rows[1][1] == {"t": "verified.unknown"}
    half = '{"step": 1, "loss": 2.0}\n{"step": 2, "lo'
    cut = make_run(tmp_path, "cut", metrics=half, events=None)
    assert sections(cut)["loss"][0]["series"][0]["x"] == [1]
    begun = make_run(tmp_path, "begun", metrics=None, **dict.fromkeys(names))
    assert sections(begun)["summary"][0]["rows"][0][1] == {"t": "state.unfinished"}


JUNK = [
    "",
    "null",
    "[]",
    "{}",
    "[" * 9999,
    "\x00\xff",
    '{"ranks": 5, "parts": [], "holdings": [1]}',
    '{"ranks": [{"rank": []}], "parts": {"a": "x"}, "holdings": [{}]}',
    '{"step": 3, "slowest_rank": [], "slowest_ratio": 3}',
    '{"step": 1, "loss": NaN}',
    '{"step": "x", "loss": []}',
    '{"time": 1e300, "event": {}, "rows": 3}',
    '{"layouts": [3, {"layout": 7}], "settings": 4}',
    '{"memory": {"weights": "many"}}',
    '{"traceEvents": [{"ph": "X", "pid": 1, "name": 3}]}',
    '{"traceEvents": [{"ph": "X", "cat": "computes", "name": "step 1", "ts": 1e999, "dur": 1,'
    ' "pid": 0}]}',
]


@pytest.mark.parametrize("junk", JUNK)
def test_a_file_with_anything_in_it_ends_no_report(tmp_path: Path, junk: str) -> None:
    names = (
        *("run", "plan", "metrics", "events", "ranks", "prediction", "verify", "trace"),
        "profile",
    )
    for name in names:
        run_page([read_run(make_run(tmp_path, name, **{name: junk}))])
    both = run_page([read_run(tmp_path / "run"), read_run(tmp_path / "trace")])
    json.dumps(both, allow_nan=False)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path, ranks="[1, 2]", trace=None)
    (folder / "trace.json").mkdir()
    said = [problem["p"]["file"] for problem in read_run(folder).problems]
    assert said == ["ranks.json", "trace.json"]
    notes = [block for block in sections(folder)["summary"] if block["kind"] == "note"]
    assert len(notes) == 2


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for path, problem in (
        (tmp_path / "gone", "is not there"),
        (tmp_path, "has neither metrics.jsonl nor run.toml"),
        (Path(__file__), "is not a folder"),
    ):
        with pytest.raises(ConfigError, match=problem):
            read_run(path)


def test_peaks_and_dips_stay_in_a_long_line(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 1.0} for step in range(1, 50_001)]
    lines[33_333]["loss"], lines[44_444]["loss"] = 9.0, 0.1
    text = "".join(json.dumps(line) + "\n" for line in lines)
    loss = sections(make_run(tmp_path, metrics=text))["loss"][0]["series"][0]
    assert len(loss["x"]) < 1500 and max(loss["y"]) == 9.0 and min(loss["y"]) == 0.1
    assert loss["x"][0] == 1 and loss["x"][-1] == 50_000 and loss["x"] == sorted(loss["x"])


def test_nothing_of_a_rank_that_says_nothing() -> None:
    assert set(measured({}).values()) == {0.0}
    assert measured({"peak_bytes": 10, "weights_bytes": 20})["activations"] == 0.0
    assert set(predicted(read_run_without_files()).values()) == {0.0}


def read_run_without_files():  # type: ignore[no-untyped-def]
    from weft.report.read_run import RunRecord

    return RunRecord("empty")
