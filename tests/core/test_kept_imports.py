"""Imports without looking for garbage among what they make."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.core import kept_imports


@pytest.fixture
def collects() -> Iterator[None]:
    """Python collects garbage before the test, and as it did after it."""
    gc.enable()
    yield
    gc.enable()
    gc.unfreeze()


def test_what_is_imported_is_not_looked_at_again(
    collects: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "has_lists.py").write_text("lists = [[i] for i in range(10_000)]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before, collected = gc.get_freeze_count(), [s["collections"] for s in gc.get_stats()]
    with kept_imports():
        importlib.import_module("has_lists")
        during = [s["collections"] for s in gc.get_stats()]
    assert gc.isenabled()
    assert during == collected  # 10,000 lists are some 14 collections
    assert gc.get_freeze_count() - before > 10_000
    del sys.modules["has_lists"]


def test_where_nothing_is_imported_garbage_stays_garbage(collects: None) -> None:
    before = gc.get_freeze_count()
    with kept_imports():
        loop: list = []
        loop.append(loop)
    assert gc.isenabled() and gc.get_freeze_count() == before


def test_an_error_or_a_process_that_does_not_collect(collects: None) -> None:
    with pytest.raises(ImportError), kept_imports():
        importlib.import_module("no_such_module_of_weft")
    assert gc.isenabled()
    gc.disable()
    with kept_imports():
        pass
    assert not gc.isenabled()
