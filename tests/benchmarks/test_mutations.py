"""benchmarks/mutations changes what it says it changes, and tells right first names from wrong."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "mutations"
SOURCE = '''"""A module."""


class Ring:
    def pass_on(self, é, half):
        send(é).wait()
        here = é[1] - (
            half / 2
        )
        return scaled(here, half) if not half else here  # as it is


def after():
    return 1
'''


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def test_each_change_is_made_once_and_moves_no_other_line(imported: Any) -> None:
    rules = imported("rules")
    texts = {}
    for change in rules.changes(SOURCE):
        texts[change.rule, change.old] = text = rules.with_change(SOURCE, change)
        compile(text, "x.py", "exec")
        assert len(text.splitlines()) == len(SOURCE.splitlines())
        changed = [a != b for a, b in zip(SOURCE.splitlines(), text.splitlines(), strict=True)]
        if change.function == "Ring.pass_on":
            assert any(changed[4:10]) and not any([*changed[:4], *changed[10:]])
    assert "        (send(é))\n" in texts["skip a wait", "send(é).wait()"]
    assert "(half * 2)" in texts["swap an operator", "half / 2"]
    assert "(half)" in texts["drop a divisor", "half / 2"]
    assert "half / 2 - é[1]" in texts["swap operands", "é[1] - half / 2"]
    assert "(scaled(half, here))" in texts["swap arguments", "scaled(here, half)"]
    assert "é[(2)]" in texts["off by one", "1"] or "return (2)" in texts["off by one", "1"]
    assert "if (half)" in texts["drop a sign", "not half"]


@pytest.mark.parametrize(
    ("first", "begin", "end", "right"),
    [
        ("output of blocks.0.mlp (rank 1)", "blocks.0.mlp", "blocks.1.mlp", True),
        ("output of blocks.0.mlp (rank 1)", "blocks.0.mlp.up", "blocks.1.mlp.up", True),
        ("output of blocks.1.mlp (rank 1)", "blocks.0.mlp", "blocks.1.mlp", False),
        ("output of blocks.10 (rank 0)", "blocks.1", "blocks.1", False),
        ("gradient of the output of norm, after that of head agreed", "head", "head", True),
        ("gradient of the output of norm, where backward begins", "head", "head", False),
        ("gradient of up.weight (module up) at step 0; 2 of 9 gradients differ", "up", "up", True),
        ("loss of step 0: 1, one device has 2", "head", "head", False),
    ],
)
def test_a_first_name_is_right(
    imported: Any, first: str, begin: str, end: str, right: bool
) -> None:
    assert imported("first_name").is_right(first, (begin, end)) is right
