"""Columns of a table begin and end below one another, whatever the script."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from weft.core import text_table

ROWS = [["layout", "step s", "limited by"], ["dp2", "12.5", "bubble 85%"]]
CHINESE = [["布局", "一步 s", "受限于"], ["dp2", "12.5", "气泡 85%"]]


def test_columns_are_flush_left_or_right() -> None:
    assert text_table(ROWS) == ["layout  step s  limited by", "dp2     12.5    bubble 85%"]
    assert text_table(ROWS, left=(0,)) == [
        "layout  step s  limited by",
        "dp2       12.5  bubble 85%",
    ]
    assert text_table(ROWS, left=(), gap=" ") == [
        "layout step s limited by",
        "   dp2   12.5 bubble 85%",
    ]


@pytest.mark.parametrize("left", [None, (), (0, 2)])
def test_a_chinese_character_is_two_wide(left: tuple[int, ...] | None) -> None:
    found = text_table([[*row, "."] for row in CHINESE], left)
    assert len(set(map(cell_len, found))) == 1
    assert len(set(map(len, found))) == 2
