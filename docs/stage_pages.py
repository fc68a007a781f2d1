"""The pages as the site has them; mkdocs calls this file (mkdocs.yml, `hooks`).

Pages are written for viewers of the repository: they link to examples, benchmarks and source files
outside of docs/, and a Chinese page to Chinese headings. mkdocs reads one folder, and each page has
the same anchors in all languages. So this makes a folder with

- the pages of docs/;
- below repository/, every file that a page links to: Markdown as a page, a folder as a list of its
  files, all else as text;
- in them, links that lead there, the English anchors at the headings of translations, and how much
  the search counts them.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=[)\s])|(?<=(?:src|ref)=\")([^\"]+)(?=\")")
HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
HAN = r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"
PICTURES = (".svg", ".png")
# How much a page's hits count in the search of the site, by the beginning of its address.
BOOSTS = {"troubleshooting": 2, "reference/": 0.3, "repository/": 0.2}


# ---- what mkdocs calls ---------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """Fill the folder, once for each build, and let mkdocs read that one."""
    if not getattr(config.plugins["i18n"], "building", False):  # not one more language of a build
        config.docs_dir = f"{config.site_dir}-pages"
        stage(Path(config.docs_dir))
    return config


# ---- the folder ----------------------------------------------------------------------------------


def stage(folder: Path) -> None:
    """Write all pages and what they link to."""
    shutil.rmtree(folder, ignore_errors=True)
    todo = [path for path in sorted(DOCS.rglob("*")) if path.is_file() and path.suffix != ".py"]
    done: set[Path] = set()
    while todo:
        source = todo.pop()
        if source in done:
            continue
        done.add(source)
        file = folder / place(source)
        file.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            file.write_text(page_of(list_of(source), source), encoding="utf-8")
            todo += listed(source)
        elif source.suffix == ".md":
            text = source.read_text(encoding="utf-8")
            file.write_text(page_of(text, source), encoding="utf-8")
            todo += [target for target, _ in links(text, source) if target.exists()]
        else:
            shutil.copyfile(source, file)


def place(source: Path) -> str:
    """Where a file or folder of the repository is in the site."""
    if source.is_relative_to(DOCS):
        return source.relative_to(DOCS).as_posix()
    path = "repository" / source.relative_to(ROOT)
    path = path.with_name(
        path.name.replace(".zh-CN.md", ".zh.md")
    )  # mkdocs's name of a translation
    if source.is_dir():
        return (path / "files.md").as_posix()
    if source.suffix in (".md", *PICTURES):
        return path.as_posix()
    return path.with_name(source.name.replace(".", "_") + ".txt").as_posix()  # shown, not saved


def listed(folder: Path) -> list[Path]:
    """The files of a folder that its page lists."""
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name[0] not in "._")


def list_of(folder: Path) -> str:
    """A page with a folder's files."""
    rows = [f"- [{path.name}]({path.name})" for path in listed(folder)]
    return "\n".join([f"# {folder.relative_to(ROOT)}", "", *rows, ""])


# ---- a page --------------------------------------------------------------------------------------


def page_of(text: str, source: Path) -> str:
    """A page with the site's links and anchors, and Chinese lines joined."""
    original = original_of(source)
    chinese = source != original and original.exists()
    text = outside_code(text, lambda part: LINK.sub(lambda m: moved(m[0], source), part))
    if chinese:
        anchors = iter(slugs(original.read_text(encoding="utf-8")))
        text = outside_code(
            text,
            lambda part: HEADING.sub(lambda m: f"{m[0]} {{ #{next(anchors, '')} }}", part),
        )
        text = outside_code(text, lambda part: re.sub(f"(?<={HAN})\n(?={HAN})", "", part))
    boost = next((value for start, value in BOOSTS.items() if place(source).startswith(start)), 1)
    return f"---\nsearch:\n  boost: {boost}\n---\n{text}" if boost != 1 else text


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with `change` made to all that is in no block of code."""
    kept = [match[0] for match in FENCE.finditer(text)]
    parts = [change(part) for part in FENCE.sub("\0", text).split("\0")]
    return "".join(part + code for part, code in zip(parts, [*kept, ""]))


def links(text: str, source: Path) -> Iterator[tuple[Path, str]]:
    """The files of the repository that a page links to, with their anchors."""
    for match in LINK.finditer(FENCE.sub("", text)):
        if not re.match(r"[a-z]+:", match[0]):
            path, _, anchor = match[0].partition("#")
            yield (folder_of(source) / path).resolve() if path else source, anchor


def folder_of(source: Path) -> Path:
    """The folder from which a page's links lead."""
    return source if source.is_dir() else source.parent


def moved(link: str, source: Path) -> str:
    """A link of the repository as a link of the site."""
    if re.match(r"[a-z]+:", link):
        return link
    path, _, anchor = link.partition("#")
    target = (folder_of(source) / path).resolve() if path else source
    if not target.exists():
        return link  # which mkdocs reports
    if original_of(source) == source:  # both languages have one address, and the reader chooses
        target = original_of(target)
    new = posixpath.relpath(place(target), posixpath.dirname(place(source))) if path else ""
    return f"{new}#{shared_anchor(target, anchor)}" if anchor else new


def original_of(page: Path) -> Path:
    """The English page of a translation; of another page, itself."""
    return page.with_name(re.sub(r"\.zh(-CN)?\.md$", ".md", page.name))


def shared_anchor(target: Path, anchor: str) -> str:
    """The English anchor of a heading of a translation."""
    original = original_of(target)
    if original == target or not original.exists():
        return anchor
    pairs = zip(*(slugs(page.read_text(encoding="utf-8")) for page in (target, original)))
    return dict(pairs).get(anchor, anchor)


def slugs(text: str) -> list[str]:
    """The anchors that GitHub makes of a page's headings, in order."""
    found: list[str] = []
    plain: list[str] = []
    for match in HEADING.finditer(FENCE.sub("", text)):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", match[2].strip().lower())
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        again = plain.count(slug)
        plain.append(slug)
        found.append(f"{slug}-{again}" if again else slug)
    return found
