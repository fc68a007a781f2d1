"""Layouts side by side: the table, and the picture of their memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import Result

from tests.pipeline.test_draw import SVG, boxes
from tests.planner.test_plan_command import files, weft

LAYOUTS = ("pp2", "dp2", "fsdp2+zero1", "fsdp2", "tp2+sequence")


def compared(folder: Path, *options: str, memory_gib: float = 80.0) -> Result:
    run, sheet = files(folder, memory_gib)
    chosen = [word for layout in LAYOUTS for word in ("--layout", layout)]
    return weft("plan", run, "--cluster", f"{sheet}x2", *chosen, *options)


def columns(text: str) -> dict[str, list[str]]:
    """Name of a line -> its cells, of the table."""
    table = text.split("\n\n", 1)[1].partition("\n\nwhat ranks divide")[0]
    lines = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines() if line.strip()]
    return {"layout": lines[0], **{name: cells for name, *cells in lines[1:]}}


def test_a_column_for_each_layout_in_the_order_given(tmp_path: Path) -> None:
    said = compared(tmp_path)
    assert said.exit_code == 0, said.output
    found = columns(said.output)
    assert found["layout"] == list(LAYOUTS)
    rows = {row["layout"]: row for row in json.loads(compared(tmp_path, "--json").output)["rows"]}
    for place, layout in enumerate(LAYOUTS):
        row = rows[layout]
        assert float(found["step, s"][place]) == pytest.approx(row["step_s"], rel=1e-3)
        sent = float(found["a rank sends in a step, GiB"][place].replace(",", ""))
        assert sent * 2**30 == pytest.approx(sum(row["traffic"].values()), rel=0.06)
        held = float(found["a rank holds, GiB"][place]) * 2**30
        assert held == pytest.approx(row["held_bytes"], rel=0.06)
        for part in ("weights", "optimizer", "activations"):
            kept = row["memory"][part]
            assert float(found[part][place]) * 2**30 == pytest.approx(kept, rel=0.06)
    assert [cell != "-" for cell in found["over tp"]] == [False] * 4 + [True]
    assert [cell != "-" for cell in found["bubble"]] == [True] + [False] * 4
    assert found["fits"] == ["yes"] * 5


def test_what_ranks_divide(tmp_path: Path) -> None:
    said = compared(tmp_path).output.partition("what ranks divide\n")[2].splitlines()
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in said[:5]}
    assert lines["pp2"] == "pp: stages" and lines["dp2"] == "dp: samples"
    assert lines["fsdp2+zero1"].startswith("fsdp: samples, state; +zero1: optimizer state sharded")
    assert lines["tp2+sequence"].startswith("tp: features, vocabulary; +sequence: ")


def test_one_layout_and_a_search_have_the_table_of_rows(tmp_path: Path) -> None:
    run, sheet = files(tmp_path)
    for layout in ("dp2", "dp*"):
        said = weft("plan", run, "--cluster", f"{sheet}x2", "--layout", layout).output
        assert "limited by" in said and "what ranks divide" not in said


def test_the_picture_of_memory(tmp_path: Path) -> None:
    image = tmp_path / "memory.svg"
    said = compared(tmp_path, "--out", str(image), memory_gib=0.002)
    assert said.exit_code == 0 and said.output.endswith(f"written: {image}\n"), said.output
    rows = {row["layout"]: row for row in json.loads(compared(tmp_path, "--json").output)["rows"]}
    root = ElementTree.fromstring(image.read_text())
    bars: dict[float, float] = {}
    for rect in root.iter(f"{SVG}rect"):
        if rect.find(f"{SVG}title") is not None:
            x = float(rect.get("x", 0))
            bars[x] = bars.get(x, 0.0) + float(rect.get("height", 0))
    heights = [height for _, height in sorted(bars.items())]
    held = [rows[layout]["held_bytes"] for layout in LAYOUTS]
    for height, nbytes in zip(heights, held, strict=True):
        assert height / heights[0] == pytest.approx(nbytes / held[0], rel=0.01)
    found = boxes(image.read_text())
    written = [content for content, *_ in found]
    assert all(layout in written for layout in LAYOUTS) and "device: 0.002" in written
    for place, (one, left, right, y) in enumerate(found):
        assert left >= 0 and right <= float(root.get("width", 0)) + 1, one
        for other, left2, right2, y2 in found[place + 1 :]:
            apart = right <= left2 + 1 or right2 <= left + 1 or abs(y - y2) >= 11
            assert apart, f"{one!r} runs into {other!r}"
