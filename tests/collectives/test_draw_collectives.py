"""Pictures of collectives: what stands in them, and the command that makes them."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from tests.pipeline.test_draw import SVG, boxes
from weft.cli.app import app
from weft.collectives import Links, Traffic, algorithms, collective_svg, collective_text, traffic_of

LINKS = Links((1e-5, 2e-5), (300e9, 25e9), 2)


def traffic(name: str, ranks: int) -> Traffic:
    options = {"local": 2} if name == "hierarchical" else {}
    return traffic_of(algorithms.make_algorithm(name, ranks, **options), 123456789.0, LINKS)


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["draw", *args], env={"NO_COLOR": "1", "FORCE_COLOR": None})


def test_text_says_what_each_rank_holds_after_each_step() -> None:
    said = run("--collective", "ring", "--ranks", "2", "--size", "1e6").output.splitlines()
    assert said == [
        "ring: all_reduce over 2 ranks, 1 MB in 2 chunks of 500 kB",
        "2 steps, 60 us",
        "= 2 x (p - 1) x (latency + size / p / bandwidth)",
        "= 2 x (2 - 1) x (1e-05 + 1e+06 / 2 / 2.5e+10)",
        "each rank sends 1 MB and gets 1 MB",
        "",
        "before",
        "  rank 0  0. 0.",
        "  rank 1  .1 .1",
        "",
        "step 1, reduce-scatter: 30 us",
        "  rank 0  0. 01  gets 1 from 1",
        "  rank 1  01 .1  gets 0 from 0",
        "",
        "step 2, all-gather: 30 us",
        "  rank 0  01 01  gets 0 from 1",
        "  rank 1  01 01  gets 1 from 0",
        "",
        "0..3: a chunk in which the inputs of ranks 0 and 3 are summed",
    ]


def test_colour_marks_what_is_as_promised() -> None:
    plain, coloured = (
        collective_text([traffic("ring", 3)], colour=colour) for colour in (False, True)
    )
    assert plain.plain == coloured.plain
    green = [span for span in coloured.spans if span.style == "green"]
    assert not any(span.style == "green" for span in plain.spans)
    # of three chunks on three ranks: one each, two each, three each
    assert len(green) == 3 * (1 + 2 + 3) and {
        coloured.plain[span.start : span.end] for span in green
    } == {"012"}


@pytest.mark.parametrize("ranks", [2, 4, 10])
@pytest.mark.parametrize("name", sorted(algorithms.registry()))
def test_an_image_has_every_message_and_its_texts_do_not_overlap(name: str, ranks: int) -> None:
    drawn = traffic(name, ranks)
    picture = collective_svg([drawn, drawn])
    root = ElementTree.fromstring(picture)
    tips = [node.text or "" for node in root.iter(f"{SVG}title")]
    messages = [
        f"step {number}: chunk {drawn.algorithm.chunk_name(m.chunk)} from rank {m.source} to rank"
        f" {m.target}, {m.op}"
        for number, step in enumerate(drawn.algorithm.steps, 1)
        for m in step
    ]
    assert sorted(tips[1:]) == sorted(messages * 2)
    assert name in tips[0] and "step" in (root.findtext(f"{SVG}desc") or "")
    found = boxes(picture)
    for content, left, right, y in found:
        assert left >= 0 and right <= float(root.get("width", 0)) + 1, content
        assert 8 <= y <= float(root.get("height", 0)), content
    for place, (one, left, right, y) in enumerate(found):
        for other, left2, right2, y2 in found[place + 1 :]:
            apart = right <= left2 + 1 or right2 <= left + 1 or abs(y - y2) >= 11
            assert apart, f"{one!r} runs into {other!r}"


def test_arrows_go_from_chunk_to_chunk() -> None:
    """Each begins at the height of its chunk on the one rank, and ends at that on the other."""
    root = ElementTree.fromstring(collective_svg([traffic("ring", 4)]))
    arrows = {}
    for group in root.iter(f"{SVG}g"):
        line, tip = group.find(f"{SVG}line"), group.findtext(f"{SVG}title") or ""
        head = group.find(f"{SVG}polygon")
        assert line is not None and head is not None
        end = float(head.get("points", "").split()[1].split(",")[1])
        arrows[tip] = (float(line.get("y1", 0)), end)
    ends = {}
    for tip, (start, stop) in arrows.items():
        _, _, rest = tip.partition(": chunk ")[2].partition(" from rank ")
        source, _, target = rest.partition(" to rank ")
        for rank, y in ((source, start), (target.partition(",")[0], stop)):
            assert ends.setdefault((rank, tip.partition("chunk ")[2][0]), y) == pytest.approx(
                y, abs=0.2
            )
    assert len(set(ends.values())) == 16


def test_figures_and_files(tmp_path: Path) -> None:
    args = ("--collective", "central", "--collective", "ring", "--ranks", "64", "--json")
    central, ring = json.loads(run(*args).output)
    assert central["sent_bytes"][0] == 63 * central["size_bytes"]
    assert max(ring["sent_bytes"]) == pytest.approx(2 * 63 / 64 * ring["size_bytes"])
    assert [phase["steps"] for phase in ring["phases"]] == [63, 63]
    assert sum(phase["seconds"] for phase in ring["phases"]) == pytest.approx(ring["seconds"])
    image = tmp_path / "x.svg"
    result = run("--collective", "hierarchical", "--local", "2", "--out", str(image))
    assert result.exit_code == 0 and not result.output
    ElementTree.fromstring(image.read_text())


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "nothing to draw"),
        (["1f1b", "--collective", "ring"], "cannot be drawn together with schedules"),
        (["1f1b", "--size", "3"], "--size = 3.0: applies only to --collective"),
        (["--collective", "ring", "--forward", "2"], "--forward = '2': applies only to schedules"),
        (["--collective", "ring", "--costs", "x"], "applies only to schedules"),
        (["--collective", "hierarchical"], "Give --local 2"),
        (["--collective", "ring", "--ranks", "11"], "a picture shows at most 10"),
        (["--collective", "ring", "--out", "x.json"], "name a .svg"),
        (
            ["--collective", "ring", "--bandwidth", "1,2,3"],
            "not one number, or one for each network",
        ),
        (["--collective", "ring", "--bandwidth", "0"], "give bytes per second above 0"),
        (["--collective", "ring", "--size", "-1"], "not a number of bytes"),
        (["--collective", "parameter_server", "--set", "servers=x"], "not a whole number"),
        (["--collective", "ring", "--set", "servers=2"], "ring has no such option"),
    ],
)
def test_refusals(args: list[str], message: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert message.lower() in " ".join(result.output.split()).lower()
