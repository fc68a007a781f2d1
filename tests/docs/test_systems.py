"""Each page of docs/systems is in the index, and has its Chinese."""

from __future__ import annotations

import re

import pytest

from tests.docs.scripts import ROOT

PAGES = ROOT / "docs" / "systems"
ENGLISH = sorted(page for page in PAGES.glob("*.md") if not page.name.endswith(".zh.md"))


@pytest.mark.parametrize("end", [".md", ".zh.md"])
def test_the_index_has_every_page(end: str) -> None:
    text = (PAGES / f"index{end}").read_text(encoding="utf-8")
    names = [page.name.replace(".md", end) for page in ENGLISH if page.name != "index.md"]
    assert names and not [name for name in names if f"({name})" not in text]
    assert not [name for name in names if not (PAGES / name).exists()]


@pytest.mark.parametrize("end", [".md", ".zh.md"])
def test_the_site_lists_the_pages_in_the_order_of_the_index(end: str) -> None:
    listed = re.findall(r"- systems/(\w+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    rows = re.findall(
        rf"^\| \[[^]]*\]\((\w+){re.escape(end)}\)",
        (PAGES / f"index{end}").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert listed == ["index", *rows]
