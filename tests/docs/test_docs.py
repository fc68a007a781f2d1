"""What the pages name exists, and what users can write is on a page.

The laws are functions that return a list of faults, so that each can be shown to fail.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.docs.scripts import ROOT, load_script
from tests.docs.test_reference import load_generator
from weft.collectives.algorithms import registry as collectives
from weft.core import RunConfig
from weft.engine.optimizer_factory import known_optimizers
from weft.parallel.strategies import allowed_options, registry as axes
from weft.pipeline.schedules import registry as schedules
from weft.sync import registry as syncs
from weft.sync.codecs import registry as codecs

anchors = load_script("stage_pages").slugs
PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("benchmarks/**/*.md"),
        *ROOT.glob(".github/**/*.md"),
    }
)
# The changelog says what old names were.
CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md"]


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


# ---- what users can write is on a page -----------------------------------------------------------


def missing_rows(names: Iterable[str], text: str) -> list[str]:
    """Names that have no table row of their own: a row's first cell names it in backticks."""
    cells = re.findall(r"^\| ([^|]*)\|", text, re.MULTILINE)
    documented = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    return [name for name in names if name not in documented]


@pytest.mark.parametrize(
    ("page", "registry"),
    [
        ("docs/schedules.md", schedules),
        ("docs/collectives.md", collectives),
        ("docs/sync.md", syncs),
        ("docs/codecs.md", codecs),
        ("docs/layouts.md", axes),
        ("docs/optimizers.md", known_optimizers),
    ],
)
def test_every_registry_entry_has_a_row(page: str, registry: Any) -> None:
    assert not missing_rows(registry(), read(ROOT / page)), f"add rows to {page}"


def test_every_option_of_an_axis_has_a_row() -> None:
    """An option of an axis, as `+zero2`; those of `pp` are the schedules, which have their page."""
    options = {f"+{option}" for axis in axes() if axis != "pp" for option in allowed_options(axis)}
    assert options and not missing_rows(sorted(options), read(ROOT / "docs" / "layouts.md"))


@pytest.mark.parametrize(
    ("page", "registry"), [("docs/sync.md", syncs), ("docs/codecs.md", codecs)]
)
def test_every_option_of_a_synchroniser_and_codec_is_named(page: str, registry: Any) -> None:
    text = read(ROOT / page)
    missing = [
        f"{name}: {option}"
        for name, make in registry().items()
        for option in inspect.signature(make).parameters
        if option != "codec" and f"`{option}`" not in text
    ]
    assert not missing, f"name these options in {page}"


def keys_without_description(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for key, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys_without_description(field.annotation, f"{prefix}{key}.")
        elif not field.description:
            yield prefix + key


def test_every_run_file_key_has_a_description() -> None:
    assert not list(keys_without_description(RunConfig))


def undocumented(names: Iterable[tuple[str, Any]]) -> list[str]:
    """Functions and classes without a docstring of their own."""
    found = []
    for name, value in names:
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        text = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
        # a dataclass without a docstring gets its signature as one
        if not text or text.startswith(f"{value.__name__}("):
            found.append(name)
    return found


def test_every_public_name_has_a_docstring() -> None:
    generator = load_generator()
    names = [
        (f"{face}.{name}", value)
        for face in generator.FACES
        for name, value in generator.public_names(face)
    ]
    assert names and not undocumented(names)


# ---- what pages name exists ----------------------------------------------------------------------


def broken_links(page: Path) -> list[str]:
    """Relative links whose file or heading does not exist."""
    faults = []
    for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", read(page)):
        link = target[0] or target[1]
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        file = page.parent / path if path else page
        if not file.exists():
            faults.append(f"{name_of(page)}: {link}")
        elif anchor and file.suffix == ".md" and anchor not in anchors(read(file)):
            faults.append(f"{name_of(page)}: {link} (no such heading)")
    return faults


def missing_paths(page: Path) -> list[str]:
    """Paths of the repository that do not exist. NAME in capitals stands for any name."""
    pattern = r"(?<![\w/.-])((?:src|tests|benchmarks|examples|docs)/[\w./*-]*\w)"
    faults = []
    for path in re.findall(pattern, re.sub(r"https?://\S+", "", read(page))):
        glob = re.sub(r"\b[A-Z][A-Z_]+\b(?!\.md)", "*", path)
        if not any(ROOT.glob(glob)):
            faults.append(f"{name_of(page)}: {path}")
    return faults


def exists(dotted: str) -> bool:
    """Whether this is a module of weft, or an attribute of one."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            if not hasattr(value, name):
                return name in getattr(value, "__annotations__", {})
            value = getattr(value, name)
        return True
    return False


def missing_names(page: Path) -> list[str]:
    """`weft.x.y` and `weft.x:y` that do not exist."""
    names = set(re.findall(r"(?<![\w./-])weft((?:[.:][A-Za-z_]\w*)+)", read(page)))
    return [
        f"{name_of(page)}: weft{name}"
        for name in sorted(names)
        if not exists("weft" + name.replace(":", "."))
    ]


def missing_imports(page: Path) -> list[str]:
    """Names that the page's Python imports from weft and that do not exist."""
    faults = []
    for block in re.findall(r"^```python\n(.*?)^```", read(page), re.MULTILINE | re.DOTALL):
        try:
            tree = ast.parse(textwrap.dedent(block))
        except SyntaxError:
            continue  # a signature
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "weft":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                faults += [f"{name_of(page)}: {name}" for name in names if not exists(name)]
    return faults


def missing_options(page: Path) -> list[str]:
    """Options after `weft COMMAND` that the command does not have."""
    generator = load_generator()
    app = generator.typer.main.get_command(generator.app)
    known = {
        name.removeprefix("weft "): {option for param in command.params for option in param.opts}
        for name, command in generator.commands(app, "weft")
    }
    faults = []
    lines = re.sub(r"\\\n\s*", " ", read(page)).splitlines()
    for line in lines:
        for call in re.findall(r"\bweft ((?:[a-z]+ )+[^`#|]*)", line):
            words = call.split()
            name = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
            given = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
            given = {re.match(r"--[a-z-]+", word).group() for word in given}
            if name in known:
                faults += [
                    f"{name_of(page)}: weft {name} {option}"
                    for option in sorted(given - known[name] - {"--help"})
                ]
    return faults


LAWS = [broken_links, missing_paths, missing_names, missing_imports, missing_options]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_what_a_page_names_exists(page: Path, law: Any) -> None:
    assert not law(page)


def long_lines(page: Path) -> list[str]:
    """Lines of prose over 100 columns; tables, code, links and pictures may be longer."""
    prose = re.sub(r"^( *)```.*?^\1```", "", read(page), flags=re.MULTILINE | re.DOTALL)
    return [
        f"{name_of(page)}: {line[:40]}..."
        for line in prose.splitlines()
        if len(line) > 100 and " " in line[:100] and not line.lstrip().startswith(("|", "!["))
    ]


@pytest.mark.parametrize(
    "page",
    [
        p
        for p in PAGES
        if not p.is_relative_to(ROOT / "benchmarks")
        and p.parent.name != "reference"
        and ".zh" not in p.name  # a break between two Chinese words shows as a space
    ],
    ids=name_of,
)
def test_prose_keeps_within_100_columns(page: Path) -> None:
    assert not long_lines(page)


# ---- the laws themselves -------------------------------------------------------------------------


def test_each_law_fails_on_a_planted_fault(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "[a](gone.md) [b](#nowhere) `weft plan run.toml --nonesuch 3`\n"
        "`src/weft/core/nonesuch.py` `weft.core.nonesuch`\n"
        "```python\nfrom weft.core import nonesuch\n```\n"
    )
    assert broken_links(page) == ["page.md: gone.md", "page.md: #nowhere (no such heading)"]
    assert missing_paths(page) == ["page.md: src/weft/core/nonesuch.py"]
    assert missing_names(page) == ["page.md: weft.core.nonesuch"]
    assert missing_imports(page) == ["page.md: weft.core.nonesuch"]
    assert missing_options(page) == ["page.md: weft plan --nonesuch"]
    page.write_text("word " * 30 + "\n| " + "cell " * 30 + "|\n```\n" + "code " * 30 + "\n```\n")
    assert long_lines(page) == ["page.md: word word word word word word word word ..."]
    assert missing_rows(["ring", "gone"], "| `ring` | text |\n\nthe word `gone`") == ["gone"]

    class Table(BaseModel):
        key: int = 0

    assert list(keys_without_description(Table)) == ["key"]

    def silent() -> None: ...

    assert undocumented([("silent", silent)]) == ["silent"]


# ---- where to begin ------------------------------------------------------------------------------


def lost_first_files(docstrings: dict[Path, str]) -> list[str]:
    """Files that a package's docstring says to open first, and that are not in it."""
    return [
        f"{folder.name}: {name}"
        for folder, text in docstrings.items()
        for name in re.findall(r"`([\w/]+\.py)`", text)
        if not ((folder / name).is_file() or (folder.parents[1] / name).is_file())
    ]


def test_the_file_to_open_first_is_there() -> None:
    faces = sorted(ROOT.glob("src/weft/*/__init__.py"))
    texts = {face.parent: ast.get_docstring(ast.parse(face.read_text())) or "" for face in faces}
    assert lost_first_files(texts) == []
    named = {folder for folder, text in texts.items() if "first" in text}
    assert len(named) > 10
    assert lost_first_files({ROOT / "src/weft/core": "Open `nowhere.py` first."})


def test_the_number_of_injected_bugs_is_that_of_the_list() -> None:
    rows = re.findall(r"^\| `\w+` \|", (ROOT / "docs/reference/bugs.md").read_text(), re.MULTILINE)
    found = re.search(r"inject (\d+) silent bugs", (ROOT / "README.md").read_text())
    assert found is not None and int(found[1]) == len(rows)
