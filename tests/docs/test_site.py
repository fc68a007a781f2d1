"""The documentation site: it builds with --strict, all of its links lead somewhere, both languages
can be searched, and a page shows there what a viewer of the repository shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt

from tests.docs.test_docs import ROOT

ENTRY = ("a", "link", "script", "img", "iframe", "source")
COUNTED = ("h1", "h2", "h3", "h4", "table", "tr", "li", "pre", "img")


class Page(HTMLParser):
    """The links, anchors and counted elements of a page."""

    def __init__(self, html: str):
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []  # without a click
        self.anchors: set[str] = set()
        self.elements: list[str] = []
        self.codes: list[str] = []
        self._in_code = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        self.anchors |= {values[key] for key in ("id", "name") if key in values}
        self.elements.append(tag)
        if tag == "code":
            self._in_code += 1
            self.codes.append("")
        if tag in ENTRY and (link := values.get("href", values.get("src"))) is not None:
            canonical = values.get("rel") in ("canonical", "alternate", "prev", "next")
            (self.links if tag == "a" or canonical else self.loaded).append(link)

    def handle_endtag(self, tag: str) -> None:
        self._in_code -= tag == "code"

    def handle_data(self, data: str) -> None:
        if self._in_code:
            self.codes[-1] += data


def faults(site: Path) -> Iterator[str]:
    """Links without a file or an anchor, and what a page loads from elsewhere."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    for path, page in pages.items():
        name = path.relative_to(site)
        for link in page.loaded + page.links:
            if re.match(r"[a-z]+:|//", link):
                if link in page.loaded and not link.startswith("data:"):
                    yield f"{name} loads {link}"
                continue
            address, _, anchor = unquote(link).partition("#")
            folder = site if address.startswith("/") else path.parent
            target = (folder / address.lstrip("/")).resolve() if address else path
            if target.is_dir():
                yield f"{name}: {link} is a folder, which opens only with a server"
            elif not target.is_file():
                yield f"{name}: {link}"
            elif anchor and target in pages and anchor not in pages[target].anchors:
                yield f"{name}: {link} (no such anchor)"


@pytest.mark.slow  # test_docs.py holds the links of the pages themselves
def test_every_link_leads_somewhere(site: Path) -> None:
    assert len([*site.rglob("*.html")]) > 80
    assert not [*faults(site)]


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a id="x" href="b.html#y"></a><a href="gone.html"></a><a href="#z"></a>'
        '<script src="https://example.org/a.js"></script><a href="https://example.org"></a>'
    )
    (tmp_path / "b.html").write_text('<p id="y"></p><img src="gone.svg"><a href="."></a>')
    assert sorted(faults(tmp_path)) == [
        "a.html loads https://example.org/a.js",
        "a.html: #z (no such anchor)",
        "a.html: gone.html",
        "b.html: . is a folder, which opens only with a server",
        "b.html: gone.svg",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("word", "place"), [("bubble", ""), ("流水线", "zh/"), ("归约", "zh/")])
def test_both_languages_are_searched(site: Path, word: str, place: str) -> None:
    """Chinese is cut into words, between zero-width spaces."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert {"en", "zh"} <= {*index["config"]["lang"]}
    found = [
        entry["location"]
        for entry in index["docs"]
        if word in re.split(r"[\W_]+", f"{entry['title']} {entry['text']}".lower())
    ]
    assert [location for location in found if location.startswith(place)]
    assert (site / "search" / "search_index.js").read_text(encoding="utf-8")[
        :14
    ] == "var __index = "


def one_line(code: str) -> str:
    return " ".join(code.split())


@pytest.mark.slow
def test_a_page_shows_what_a_viewer_of_the_repository_shows(site: Path) -> None:
    """The same headings, tables, list items, blocks and code, by another reader of Markdown."""
    reader = MarkdownIt("commonmark").enable("table")
    differing = []
    for source in sorted((ROOT / "docs").rglob("*.md")):
        path = source.relative_to(ROOT / "docs").as_posix()
        built = f"zh/{path[:-6]}.html" if path.endswith(".zh.md") else f"{path[:-3]}.html"
        html = (site / built).read_text(encoding="utf-8")
        article = html.partition("<article")[2].partition("</article>")[0]
        theirs, ours = Page(reader.render(source.read_text(encoding="utf-8"))), Page(article)
        for tag in COUNTED:
            counts = theirs.elements.count(tag), ours.elements.count(tag)
            if counts[0] != counts[1]:
                differing.append(f"{path}: {counts[0]} of {tag}, on the site {counts[1]}")
        lost = {*map(one_line, theirs.codes)} - {*map(one_line, ours.codes)}
        differing += [f"{path}: the site lacks {code!r}" for code in sorted(lost)]
    assert not differing
