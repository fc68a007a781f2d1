"""Pictures: what stands in them, that nothing overlaps or wraps, and the command that makes
them."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.text import Text
from typer.testing import CliRunner, Result

from weft.cli.app import app
from weft.core.action_costs import ActionCosts
from weft.core.schedule import Action, from_csv, to_csv
from weft.pipeline import schedules
from weft.pipeline.draw import perfetto, svg, text
from weft.pipeline.simulator import simulate
from weft.pipeline.timeline import Timeline
from weft.pipeline.weight_versions import versions_used

SVG = "{http://www.w3.org/2000/svg}"
MEASURED = Timeline.of(
    [
        [(Action("F", 0, 0), 0.0, 1.0), ("recv-wait", 1.0, 3.5), (Action("B", 0, 0), 3.5, 5.0)],
        [("<odd & label>", 0.0, 1.0), (Action("F", 1, 0), 1.5, 2.0), (Action("B", 1, 0), 2.0, 3.5)],
    ]
)


def simulated(
    name: str, ranks: int, microbatches: int, costs: ActionCosts | None = None
) -> Timeline:
    return simulate(schedules.make_schedule(name, ranks, microbatches), costs)


# ---- terminal ------------------------------------------------------------------------------------


def test_plain_picture() -> None:
    picture = text([("1f1b", simulated("1f1b", 2, 3))], width=80).plain
    assert picture.splitlines() == [
        "1f1b: makespan 12 s, ideal 9 s, bubble 3 s (25.0 %)",
        "rank 0  F0 F1       B0--- F2 B1---    B2---",
        "rank 1     F0 B0--- F1 B1--- F2 B2---",
        "",
        "               idle  peak live  live microbatches over time",
        "rank 0  3 s  25.0 %          2  " + "▄" * 2 + "█" * 22 + "▄" * 8,
        "rank 1  3 s  25.0 %          1    " + "▄" * 25,
        "",
        "F forward   B backward",
    ]


@pytest.mark.parametrize("colour", [False, True])
def test_equal_actions_have_equal_cells(colour: bool) -> None:
    rows = [
        text([("x", simulated("zb-h1", 4, 9, costs))], colour=colour).plain.splitlines()[1:5]
        for costs in (
            ActionCosts(1.0, 1.0, 1.0),
            ActionCosts(0.1, 0.1, 0.1),
            ActionCosts(0.7e-3, 0.7e-3, 0.7e-3),
        )
    ]
    assert rows[0] == rows[1] == rows[2], "whatever the rounding of their times"


def test_small_letters_for_later_stages() -> None:
    rows = text(
        [("x", simulated("interleaved", 2, 2, ActionCosts(0.5, 0.5, 0.5)))], width=80
    ).plain.splitlines()
    assert rows[1].startswith("rank 0  F0 F1 f0 f1")
    assert "small letters" in rows[-1]


def test_ascii() -> None:
    assert text([("x", simulated("zb-v", 4, 8))], width=80, ascii_only=True).plain.isascii()


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("width", [40, 63, 80, 120, 300])
def test_no_line_is_wider_than_the_terminal(width: int, colour: bool) -> None:
    for name, ranks, microbatches in [
        ("1f1b", 8, 32),
        ("zb-v", 2, 2),
        ("interleaved", 4, 128),
        ("pipedream", 12, 3),
    ]:
        costs = ActionCosts(forward_s=0.0123, comm_s=0.001, activation_bytes=123e6)
        picture = text(
            [(name, simulated(name, ranks, microbatches, costs))], width=width, colour=colour
        )
        rows = [row for row in picture.plain.splitlines() if row.startswith("rank ")]
        assert len(rows) == 2 * ranks
        assert max(map(len, rows)) <= width


def test_condensed_says_so_and_keeps_the_proportions() -> None:
    wide, narrow = (
        text([("x", simulated("gpipe", 4, 64))], width=w).plain.splitlines() for w in (10_000, 80)
    )
    assert not any("condensed" in line for line in wide) and "condensed: a column is" in narrow[-1]
    assert "F63" in wide[1] and "F63" not in narrow[1]
    first, last = narrow[1].index("B") - 8, len(narrow[1]) - 8
    assert first / last == pytest.approx((64 + 3 + 6 + 0) / (67 * 3), abs=0.03)


def test_colours_only_where_asked() -> None:
    timeline = simulated("zb-h1", 2, 2)
    plain, coloured = (text([("x", timeline)], width=80, colour=colour) for colour in (False, True))
    assert not any(str(span.style) for span in plain.spans)
    row = coloured.split("\n")[1]
    styles = [str(span.style) for span in row.spans]
    assert len({style for style in styles if " on #" in style}) == 3, "F, B and W differ"
    assert row.plain.startswith("rank 0  0 1 ") and "F" not in row.plain
    assert row.plain == Text.from_ansi(row.plain).plain


def test_several_share_one_time_axis() -> None:
    short, long = simulated("zb-h1", 4, 4), simulated("naive", 4, 4)
    together = text([("a", short), ("b", long)], width=10_000).plain.splitlines()
    alone = text([("a", short)], width=10_000).plain.splitlines()
    assert together[1] == alone[1]
    assert "condensed" in text([("a", short), ("b", long)], width=70).plain
    assert "condensed" not in text([("a", short)], width=70).plain


def test_what_is_not_an_action_lies_beneath() -> None:
    rows = text([("measured", MEASURED)], width=80).plain.splitlines()
    assert rows[1].startswith("rank 0  F0") and "~~~" in rows[1] and "B0" in rows[1]
    over = Timeline.of([[(Action("B", 0, 0), 0.0, 2.0), ("reduce", 1.0, 4.0)]])
    assert "B0 ~~~" in text([("x", over)]).plain, "the action over what overlaps with it"
    assert "~ recv-wait" in rows[-1] and "~ <odd & label>" in rows[-1]


# ---- SVG -----------------------------------------------------------------------------------------


def boxes(picture: str) -> list[tuple[str, float, float, float]]:
    """(what, left, right, baseline) of every text, with widths on the safe side for the font sizes
    used."""
    found = []
    for node in ElementTree.fromstring(picture).iter(f"{SVG}text"):
        content, size = node.text or "", float(node.get("font-size", 12))
        width, x = 0.52 * size * len(content), float(node.get("x", 0))
        left = x - {"end": width, "middle": width / 2}.get(node.get("text-anchor", ""), 0.0)
        found.append((content, left, left + width, float(node.get("y", 0))))
    return found


@pytest.mark.parametrize(
    "name, ranks, microbatches",
    [
        ("1f1b", 2, 2),
        ("1f1b", 8, 32),
        ("interleaved", 4, 64),
        ("zb-h1", 40, 40),
        ("zb-v", 1, 1),
        ("gpipe", 300, 10),
    ],
)
def test_texts_do_not_overlap_and_stay_inside(name: str, ranks: int, microbatches: int) -> None:
    costs = ActionCosts(0.0011, 0.0012, 0.0013, activation_bytes=123456789.0)
    timeline = simulated(name, ranks, microbatches, costs)
    picture = svg([("predicted: " + name, timeline), ("again", timeline)])
    root = ElementTree.fromstring(picture)
    found = boxes(picture)
    for content, left, right, y in found:
        assert left >= 0 and right <= float(root.get("width", 0)) + 1, content
        assert 8 <= y <= float(root.get("height", 0)), content
    rows = itertools.groupby(
        sorted(found, key=lambda box: (box[3], box[1])), key=lambda box: box[3]
    )
    for _, row in rows:
        for (one, _, right, _), (other, left, _, _) in itertools.pairwise(row):
            assert right <= left + 1, f"{one!r} runs into {other!r}"
    heights = sorted({y for _, left, _, y in found if left < 30})
    assert all(b - a >= 11 for a, b in itertools.pairwise(heights)), "lines to the left stand apart"


def test_svg_has_every_action_at_its_time() -> None:
    timeline = simulated("zb-h1", 4, 8)
    root = ElementTree.fromstring(svg([("zb-h1", timeline)]))
    cells = {}
    for rect in root.iter(f"{SVG}rect"):
        if (tip := rect.find(f"{SVG}title")) is not None:
            cells[(tip.text or "").partition(":")[0]] = (
                float(rect.get("x", 0)),
                float(rect.get("width", 0)),
            )
    assert len(cells) == 4 * 8 * 3
    zero, second = cells["0F0"]
    for lane in timeline.lanes:
        for label, start, stop in lane.spans:
            x, width = cells[str(label)]
            assert x == pytest.approx(zero + start * second, abs=0.5)
            assert width == pytest.approx((stop - start) * second, abs=0.05)
    written = " ".join(filter(None, (node.text for node in root.iter(f"{SVG}text"))))
    assert (
        "bubble 3 s (11.1 %)" in written and "weight gradient" in written and "peak live" in written
    )


def test_curves_lie_between_the_lanes() -> None:
    for ranks in (2, 60):
        root = ElementTree.fromstring(svg([("x", simulated("gpipe", ranks, 4))]))
        lanes = sorted({float(r.get("y", 0)) for r in root.iter(f"{SVG}rect") if r.get("stroke")})
        height = next(float(r.get("height", 0)) for r in root.iter(f"{SVG}rect") if r.get("stroke"))
        bases = sorted(
            float(path.get("d", "")[1:].split("H")[0].split()[1])
            for path in root.iter(f"{SVG}path")
        )
        assert len(lanes) == len(bases) == ranks
        assert all(
            lane + height < base <= after
            for lane, base, after in zip(lanes, bases, [*lanes[1:], 1e9])
        )


def test_measured_under_predicted_on_one_axis() -> None:
    root = ElementTree.fromstring(
        svg([("predicted", simulated("gpipe", 2, 1)), ("measured <1>", MEASURED)])
    )
    tips = [tip.text or "" for tip in root.iter(f"{SVG}title")]
    assert sum(tip.startswith("0F0: 0 s to 1 s") for tip in tips) == 2
    assert any(tip.startswith("<odd & label>") for tip in tips)
    x = [
        rect.get("x")
        for rect in root.iter(f"{SVG}rect")
        for tip in rect
        if (tip.text or "").startswith("0F0")
    ]
    assert x[0] == x[1]
    assert "measured <1>" in [node.text for node in root.iter(f"{SVG}text")]


def test_narrow_cells_merge() -> None:
    """A picture grows with its width in pixels, not with the schedule."""
    assert len(svg([("x", simulated("gpipe", 4, 5000))])) < 10 * len(
        svg([("x", simulated("gpipe", 4, 50))])
    )


def test_nothing_to_draw() -> None:
    for timeline in (Timeline.of([[], []]), simulated("1f1b", 2, 2, ActionCosts(0.0, 0.0, 0.0))):
        assert "makespan 0 s" in text([("x", timeline)]).plain
        ElementTree.fromstring(svg([("x", timeline)]))
        json.loads(perfetto([("x", timeline)]))


# ---- Perfetto ------------------------------------------------------------------------------------


def test_perfetto() -> None:
    predicted = simulated("zb-h1", 2, 4)
    events = json.loads(perfetto([("predicted", predicted), ("measured", MEASURED)]))["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(processes.values()) == ["predicted", "measured"]
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    assert threads == {
        (1, 0): "rank 0",
        (1, 2): "rank 1",
        (2, 0): "rank 0",
        (2, 1): "rank 0: waits and messages",
        (2, 2): "rank 1",
        (2, 3): "rank 1: waits and messages",
    }

    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 2 * 4 * 3 + 6
    for rank, lane in enumerate(predicted.lanes):
        drawn = [e for e in spans if (e["pid"], e["tid"]) == (1, 2 * rank)]
        for event, (label, start, stop) in zip(drawn, lane.spans, strict=True):
            assert isinstance(label, Action)
            assert (event["ts"], event["dur"]) == (start * 1e6, (stop - start) * 1e6)
            assert event["args"] == {"stage": label.stage, "microbatch": label.microbatch}
            assert (event["name"], event["cat"]) == (str(label), label.kind)
    assert [e["name"] for e in spans if e["pid"] == 2 and e["tid"] % 2] == [
        "recv-wait",
        "<odd & label>",
    ]

    live = [
        e["args"]["microbatches"]
        for e in events
        if e["ph"] == "C" and e["pid"] == 1 and "rank 0" in e["name"]
    ]
    assert max(live) == predicted.peak_live[0] and live[-1] == 0


# ---- weft draw -----------------------------------------------------------------------------------


def run(*args: str) -> Result:
    return CliRunner().invoke(
        app, ["draw", *args], env={"COLUMNS": "100", "FORCE_COLOR": None, "NO_COLOR": "1"}
    )


def test_command_prints_the_picture_without_escapes() -> None:
    result = run("1f1b", "zb-h1", "--ranks", "2", "--microbatches", "3")
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert "rank 0  F0 " in result.output and "zb-h1: makespan 10 s" in result.output
    assert max(map(len, result.output.splitlines())) <= 100


def test_the_picture_in_the_docs_is_real() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
    command, _, picture = docs.partition("$ weft draw ")[2].partition("```")[0].partition("\n")
    assert run(*command.split()).output == picture


def test_command_in_a_terminal_with_colours() -> None:
    env = {
        "COLUMNS": "100",
        "FORCE_COLOR": "1",
        "NO_COLOR": None,
        "TERM": "xterm-256color",
        "COLORTERM": "truecolor",
    }
    result = CliRunner().invoke(
        app, ["draw", "1f1b", "--ranks", "2", "--microbatches", "3"], env=env
    )
    assert "\x1b[" in result.output and "F0" not in result.output
    result = CliRunner().invoke(app, ["draw", "1f1b"], env={**env, "NO_COLOR": "1"})
    assert "F0" in result.output, "letters, where there are no colours"


def test_stages_share_the_cost_of_their_rank() -> None:
    result = run(
        "1f1b", "interleaved", "--microbatches", "8", "--chunks", "4", "--forward", "2", "--json"
    )
    plain, interleaved = json.loads(result.output)
    assert (plain["schedule"], interleaved["schedule"]) == ("1f1b", "interleaved")
    assert plain["ideal_s"] == interleaved["ideal_s"] == 8 * 4
    assert plain["bubble_s"] == 3 * 4
    assert interleaved["bubble_s"] == 3 * 4 / 4, "--chunks goes to the schedule that has it"


def test_costs_per_stage_updates_messages_and_sizes() -> None:
    args = [
        "--ranks",
        "2",
        "--microbatches",
        "1",
        "--forward",
        "1,2",
        "--backward",
        "3",
        "--weight",
        "0",
        "--json",
    ]
    [found] = json.loads(
        run("pipedream", *args, "--comm", "0.5", "--update", "4", "--activation", "10,20").output
    )
    assert found["makespan_s"] == 1 + 0.5 + 2 + 3 + 0.5 + 3 + 4
    assert found["peak_memory"] == [10, 20]


def test_options_of_a_schedule() -> None:
    assert run("pipedream", "--set", "versions=2bw").exit_code == 0
    assert "pipeline.versions = 'none'" in run("pipedream", "--set", "versions=none").output


def test_a_solved_schedule_is_made_for_the_costs() -> None:
    args = ["--ranks", "2", "--microbatches", "3", "--forward", "1,4", "--weight", "3,1", "--json"]
    [found] = json.loads(run("solved", "--set", "evaluations=20", *args).output)
    costs = ActionCosts(forward_s=(1.0, 4.0), weight_s=(3.0, 1.0))
    meant, other = (
        schedules.make_schedule("solved", 2, 3, evaluations=20, **extra)
        for extra in ({"costs": costs}, {})
    )
    assert (
        found["makespan_s"] == simulate(meant, costs).makespan_s < simulate(other, costs).makespan_s
    )


def test_files(tmp_path: Path) -> None:
    image, trace, table = (tmp_path / f"x.{suffix}" for suffix in ("svg", "json", "csv"))
    for path in (image, trace, table):
        result = run("zb-v", "--ranks", "2", "--microbatches", "4", "--out", str(path))
        assert result.exit_code == 0 and not result.output, result.output
    ElementTree.fromstring(image.read_text())
    assert json.loads(trace.read_text())["traceEvents"]
    made = schedules.make_schedule("zb-v", 2, 4)
    assert from_csv(table.read_text(), "zb-v") == made

    again = json.loads(run(str(table), "--json").output)
    assert (
        again[0]["schedule"] == "x"
        and again[0]["makespan_s"] == simulate(made, ActionCosts(0.5, 0.5, 0.5)).makespan_s
    )


@pytest.mark.parametrize(
    "args, message",
    [
        (["1f1"], 'Did you mean "1f1b"?'),
        (["1f1b", "--ranks", "0"], "pipeline.ranks = 0"),
        (["1f1b", "--microbatches", "-1"], "pipeline.microbatches = -1"),
        (["1f1b", "--forward", "fast"], "--forward = 'fast': is neither a number nor a list"),
        (["1f1b", "--forward", "1,2"], "2 numbers for 4 stages"),
        (["1f1b", "--weight", "-1"], "not a time or size"),
        (["1f1b", "--chunks", "2"], "1f1b has no such option"),
        (["1f1b", "gpipe", "--set", "chunk=2"], "1f1b has no such option"),
        (["1f1b", "--set", "chunks"], "--set = 'chunks': has no ="),
        (["1f1b", "--out", "x.png"], "--out = 'x.png'"),
        (["1f1b", "gpipe", "--out", "x.csv"], "--out = 'x.csv'"),
        (["1f1b", "--out", "no/such/folder.svg"], "cannot be written"),
        (["missing.csv"], "schedule = 'missing.csv': cannot be read"),
    ],
)
def test_refusals(args: list[str], message: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_table_with_faults_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(schedules.make_schedule("1f1b", 2, 2)).replace("1B1", "1B1,1B1"))
    result = run(str(path))
    assert result.exit_code == 2 and "1B1 on rank 1 stands twice" in result.output


# ---- versions of weights -------------------------------------------------------------------------


def test_a_schedule_that_updates_in_between_shows_the_version_of_its_weights() -> None:
    """Updates take no time by default: without it PipeDream's picture is that of 1F1B."""
    picture = text([("pipedream", simulated("pipedream", 2, 3))], width=80).plain.splitlines()
    assert picture[1:7] == [
        "rank 0  F0 F1       B0--- F2 B1---    B2---",
        "uses    0  0        0     1  0        1",
        "newest  0                 1        2        3",
        "rank 1     F0 B0--- F1 B1--- F2 B2---",
        "uses       0  0     1  1     2  2",
        "newest  0           1        2        3",
    ]
    assert picture[-1].endswith("uses, newest: versions of the weights")
    assert "newest" not in text([("1f1b", simulated("1f1b", 2, 3))]).plain


@pytest.mark.parametrize("width", [40, 60, 120])
@pytest.mark.parametrize("colour", [False, True])
def test_versions_stand_where_they_begin_or_not_at_all(width: int, colour: bool) -> None:
    timeline = simulated("pipedream", 3, 30, ActionCosts(update_s=0.5))
    lines = text([("x", timeline)], width=width, colour=colour).plain.splitlines()
    rows = [line for line in lines if line.startswith("newest  0")]
    assert max(map(len, rows)) <= width
    assert len(rows) == 3
    for row, lane in zip(rows, timeline.lanes):
        ends = lane.updates[lane.stages[0]]
        scale = (width - 8) / timeline.makespan_s
        found = [(int(m[0]), m.start() - 8) for m in re.finditer(r"\d+", row)]
        assert len(found) > 3 and [v for v, _ in found] == sorted({v for v, _ in found})
        for version, column in found[1:-1]:
            assert abs(column - ends[version - 1] * scale) <= 0.51


@pytest.mark.parametrize("versions", ["stash", "vertical", "2bw"])
def test_an_image_has_the_version_that_each_microbatch_uses(versions: str) -> None:
    made = schedules.make_schedule("pipedream", 3, 8, versions=versions)
    timeline = simulate(made, ActionCosts(update_s=1.0))
    assert timeline.versions == versions_used(made)
    image = svg([("pipedream", timeline)])
    cells = re.findall(
        r"<title>(\d)([FB])(\d): [^<]*</title></rect><text[^>]*>(\d)</text>"
        r'<text[^>]*font-size="9"[^>]*>(\d+)</text>',
        image,
    )
    assert len(cells) == 2 * 3 * 8
    for stage, _, microbatch, number, version in cells:
        assert number == microbatch
        assert int(version) == timeline.versions[int(stage), int(microbatch)]
    assert 'font-size="9"' not in svg([("1f1b", simulated("1f1b", 3, 8))])


def test_an_image_marks_each_update_with_its_version() -> None:
    timeline = simulated("pipedream", 2, 3)
    image = ElementTree.fromstring(svg([("pipedream", timeline)]))
    marks = [e for e in image.iter(f"{SVG}line") if e.find(f"{SVG}title") is not None]
    said = [str(mark.findtext(f"{SVG}title")) for mark in marks]
    assert said[:3] == ["version 1 from 6 s", "version 2 from 9 s", "version 3 from 12 s"]
    assert len(marks) == 6 and all(
        float(mark.get("x1", "")) == float(mark.get("x2", "")) for mark in marks
    )
