"""A Chinese page has what its English one has, and keeps to the terms of the glossary."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.scripts import ROOT, load_script
from tests.docs.test_docs import name_of, read

FENCE = load_script("stage_pages").FENCE
ENGLISH = {
    ROOT / "README.zh-CN.md": ROOT / "README.md",
    **{
        page: page.with_name(page.name.replace(".zh.md", ".md"))
        for page in sorted((ROOT / "docs").rglob("*.zh.md"))
    },
}


def code(text: str) -> list[str]:
    """The blocks of code, without comments, which are translated too."""
    blocks = (match[0] for match in FENCE.finditer(text))
    return [re.sub(r"\s*(^|\s)# .*$", "", block, flags=re.MULTILINE) for block in blocks]


def structure(text: str) -> dict[str, list[str]]:
    """Kind -> what must be the same in a translation."""
    prose = FENCE.sub("", text)
    # A bilingual table may have another number of columns, not of rows.
    return {
        "headings": re.findall(r"^#+(?= )", prose, re.MULTILINE),
        "blocks of code": code(text),
        "rows of tables": re.findall(r"^\|", prose, re.MULTILINE),
        "figures in tables": re.findall(r"(?<=\| )[\d.,%()-]*\d[\d.,%()-]*(?= \|)", prose),
        "items of lists": re.findall(r"^ *(?:-|\d+\.)(?= )", prose, re.MULTILINE),
    }


def targets(text: str, page: Path) -> set[Path]:
    """The files that a page links to, of each language the English one."""
    links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", FENCE.sub("", text))
    files = (page.parent / link for link in links if ":" not in link)
    return {ENGLISH.get(file.resolve(), file.resolve()) for file in files}


def faults(translated: str, page: Path, original: str, english: Path) -> list[str]:
    """What a translation lacks, or has too much."""
    ours, theirs = structure(translated), structure(original)
    found = [f"other {kind}" for kind in ours if ours[kind] != theirs[kind]]
    mine, others = targets(translated, page), targets(original, english)
    differing = (mine ^ others) - {english}  # each may link to the other
    return found + [f"link: {path.relative_to(ROOT)}" for path in sorted(differing)]


@pytest.mark.parametrize("page", ENGLISH, ids=name_of)
def test_a_translation_has_what_its_original_has(page: Path) -> None:
    english = ENGLISH[page]
    assert not faults(read(page), page, read(english), english)


@pytest.mark.parametrize("page", ENGLISH, ids=name_of)
def test_a_chinese_page_links_to_chinese_pages(page: Path) -> None:
    """Where there is one; README.md itself is named as the other language."""
    chinese = {english: page for page, english in ENGLISH.items()}
    links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", FENCE.sub("", read(page)))
    files = [(page.parent / link).resolve() for link in links if ":" not in link]
    assert not [file for file in files if file in chinese and file != ENGLISH[page]]


def unmarked(text: str) -> list[str]:
    """Lines that link to the reference, which is in English, without saying so."""
    lines = FENCE.sub("", text).splitlines()
    return [line for line in lines if re.search(r"\]\(\S*reference/", line) and "英文" not in line]


@pytest.mark.parametrize("page", ENGLISH, ids=name_of)
def test_links_to_english_pages_are_marked(page: Path) -> None:
    assert not unmarked(read(page))


def test_an_unmarked_link_is_seen() -> None:
    assert unmarked("见[参考](reference/api.md)。") and not unmarked(
        "[参考](reference/a.md)（英文）"
    )


def test_a_stale_translation_is_seen() -> None:
    page, english = ENGLISH.popitem()
    ENGLISH[page] = english
    table = "| a |\n|---|\n| b |\n| 12% |\n"
    text = f"# A\n\n[b](layouts.md)\n\n```\nweft plan    # of all\n```\n\n{table}\n- c\n"
    good = text.replace("of all", "全部").replace("# A", "# 甲").replace("layouts.", "layouts.zh.")
    assert not faults(good, page, text, english)
    for old, new, fault in [
        ("weft plan", "weft draw", "other blocks of code"),
        ("# 甲", "## 甲", "other headings"),
        ("| b |\n", "", "other rows of tables"),
        ("- c", "c", "other items of lists"),
        ("| 12% |", "| 13% |", "other figures in tables"),
        ("layouts.zh.md", "sync.md", "link: docs/layouts.md"),
    ]:
        assert fault in faults(good.replace(old, new), page, text, english)


# ---- terms ---------------------------------------------------------------------------------------


def avoided() -> dict[str, str]:
    """A word that no page uses -> the one that all use."""
    rows = re.findall(
        r"^\| [^|]+ \| ([^|]+) \| .* \| ([^|]+) \|$",
        read(ROOT / "docs" / "glossary.zh.md"),
        re.MULTILINE,
    )
    return {word: term for term, words in rows if term != "---" for word in words.split("、")}


def other_words(text: str) -> list[str]:
    """Words of the glossary's last column, where they are no part of the term itself."""
    return [
        f"{word}: {term}"
        for word, term in avoided().items()
        if word != "不用" and word in text.replace(term, "")
    ]


@pytest.mark.parametrize("page", ENGLISH, ids=name_of)
def test_a_page_uses_the_terms_of_the_glossary(page: Path) -> None:
    text = read(page)
    if page.name == "glossary.zh.md":
        text = re.sub(r" \| [^|]+ \|$", "", text, flags=re.MULTILINE)
    assert not other_words(text)


def test_another_word_is_seen() -> None:
    assert len(avoided()) > 20
    assert other_words("用管线并行训练") == ["管线并行: 流水线并行"]


def groups(page: str) -> list[list[tuple[str, str]]]:
    """The terms under each heading of a glossary, with their Chinese; no heads of tables."""
    sections = read(ROOT / "docs" / page).split("\n## ")[1:]
    return [re.findall(r"^\| ([^|]+) \| ([^|]+) \|", part, re.M)[1:] for part in sections]


def test_both_glossaries_have_the_same_terms() -> None:
    english = groups("glossary.md")
    assert english == groups("glossary.zh.md") and sum(map(len, english)) > 50
    for group in english:
        terms = [term for term, _ in group]
        assert terms and terms == sorted(terms, key=str.lower)


def test_chinese_punctuation() -> None:
    """Between Chinese words punctuation has full width."""
    faults = [
        f"{name_of(page)}: {match[0]}"
        for page in ENGLISH
        for match in re.finditer(
            r"[\u4e00-\u9fff][,;:?!][ \u4e00-\u9fff]|[\u4e00-\u9fff]\.(?=\s|$)",
            re.sub(r"`[^`]*`|\]\([^)]*\)", "", FENCE.sub("", read(page))),
        )
    ]
    assert not faults
