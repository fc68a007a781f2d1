"""The pages of docs/systems: each is in the index and in both languages, with the same commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "systems"
ENGLISH = sorted(page for page in PAGES.glob("*.md") if not page.name.endswith(".zh.md"))


def blocks(text: str) -> list[str]:
    """The fenced blocks of a page: commands, scripts and what they print."""
    return re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL)


def figures(text: str) -> list[str]:
    """The numbers in each row of a page's tables; their order is that of the language."""
    rows = re.findall(r"^\|.*\|$", text, re.MULTILINE)
    return [" ".join(sorted(re.findall(r"\d[\d,.]*\d|\d", row))) for row in rows]


def differences(english: str, chinese: str) -> list[str]:
    """What one of two translations of a page has, and the other has otherwise."""
    found = []
    if blocks(english) != blocks(chinese):
        found.append("code")
    if english.count("\n## ") != chinese.count("\n## "):
        found.append("headings")
    if figures(english) != figures(chinese):
        found.append("figures of tables")
    return found


def test_pages_are_found() -> None:
    assert len(ENGLISH) > 20


@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.stem)
def test_a_page_and_its_translation_have_the_same_commands_and_figures(page: Path) -> None:
    chinese = page.with_suffix(".zh.md").read_text(encoding="utf-8")
    assert differences(page.read_text(encoding="utf-8"), chinese) == []


@pytest.mark.parametrize("index", ["index.md", "index.zh.md"])
def test_the_index_has_every_page(index: str) -> None:
    text = (PAGES / index).read_text(encoding="utf-8")
    assert [p.name for p in ENGLISH if p.name != "index.md" and f"({p.name})" not in text] == []


def test_the_law_fails_on_planted_faults() -> None:
    page = "\n## A\n```\nweft doctor\n```\n| x | 1,024 B |\n"
    assert differences(page, page.replace("A", "一")) == []
    assert differences(page, page.replace("doctor", "plan")) == ["code"]
    assert differences(page, page.replace("1,024", "1,023")) == ["figures of tables"]
    assert differences(page, page + "\n## B\n") == ["headings"]
