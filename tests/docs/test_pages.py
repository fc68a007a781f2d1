"""The commands that the pages show run, in small, and print what the pages show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.docs.scripts import ROOT, load_script
from tests.docs.test_docs import name_of
from tests.docs.test_reference import load_generator

refresh = load_script("refresh")
# Read first: what starts ranks or simulates large clusters runs on these pages always, on all with
# --pages.
FIRST = ("README.md", "docs/start.md")
PART = 30  # commands and files of a page that are one test, where only the quick ones run
# to draw a profile takes the run before it
QUICK = r"^weft (draw(?! --profile)|launch slurm|launch kubernetes) |^python \w+_\d+\.py"
ALL = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")})
PAGES = [page for page in ALL if not page.name.endswith((".zh.md", ".zh-CN.md"))]


def commands(page: Path) -> list[Any]:
    return [item for item in refresh.read(page) if isinstance(item, refresh.Command)]


def faults(page: Path, folder: Path, part: int | None = None) -> list[str]:
    """Commands of a page that do not end as it says, or print something else than it shows.
    `part`: which `PART` of it, and only of those that are quick."""
    found = []
    refresh.prepare(folder)
    lines = page.read_text(encoding="utf-8").splitlines()
    quick = part is not None
    for index, item in enumerate(refresh.read(page)):
        if isinstance(item, refresh.NamedFile):
            (folder / item.name).parent.mkdir(parents=True, exist_ok=True)
            (folder / item.name).write_text(item.text, encoding="utf-8")
            continue
        if quick and index // PART != part:
            continue
        if item.listed(refresh.NOT_RUN) or (quick and not is_quick(item)):
            found += [f"{item.text}: {fault}" for fault in misunderstood(item.text)]
            continue
        text = refresh.small(item, folder)
        code, output = refresh.run(text, folder, timeout=240)
        if code != item.exit_code:
            found.append(f"{text}: exit code {code}, and not {item.exit_code}\n{output}")
        elif item.output and text == item.text and not item.listed(refresh.NOT_SHOWN):
            shown = lines[slice(*item.output)]
            now = refresh.as_shown(shown, output, item)
            if different(shown, now, item):
                found.append("\n".join([f"{text} prints, run docs/refresh.py:", *now]))
    return found


def is_quick(command: Any) -> bool:
    """A plan takes longer, and runs where the page shows its numbers."""
    shown = command.output and not command.listed(refresh.NOT_SHOWN)
    plans = command.text.startswith("weft plan ") and shown
    return bool(plans or refresh.re.search(QUICK, command.text))


def different(shown: list[str], now: list[str], command: Any) -> bool:
    """Whether a page shows something else than what is printed now, where runs print the same."""
    if not refresh.re.search(f"{refresh.EXACT}|{refresh.ALIKE}", command.text):
        return False
    pair = [[refresh.comparable(line, command) for line in lines] for lines in (shown, now)]
    return bool(pair[0] != pair[1])


def misunderstood(text: str) -> list[str]:
    """Why the command line cannot be read, if it is one of weft."""
    generator = load_generator()
    for name, command in generator.commands(
        generator.typer.main.get_command(generator.app), "weft"
    ):
        if f"{text} ".startswith(f"{name} "):
            try:
                words = refresh.shlex.split(text.partition(" > ")[0])
                command.make_context(name, words[len(name.split()) :])
            except generator.typer.Exit as shown:  # help, or what is wrong
                return [f"exit code {shown.exit_code}"] if shown.exit_code else []
    return []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A long page is several tests where its commands do not depend on those before them."""
    if "part" not in metafunc.fixturenames:
        return
    cases: list[tuple[Path, int | None]] = []
    for page in PAGES:
        count = len(refresh.read(page)) if commands(page) else 0
        whole = name_of(page) in FIRST or metafunc.config.getoption("--pages")
        parts = range(0, count, PART)
        cases += [(page, None)] if whole and count else [(page, at // PART) for at in parts]
    names = [name_of(page) + (f"-{part}" if part else "") for page, part in cases]
    metafunc.parametrize(("page", "part"), cases, ids=names)


@pytest.mark.slow  # test_docs.py holds options and paths
@pytest.mark.timeout(600)
def test_commands_run_and_print_what_the_page_shows(
    page: Path, part: int | None, tmp_path: Path
) -> None:
    assert not faults(page, tmp_path, part)


def test_what_does_not_run_is_seen(tmp_path: Path) -> None:
    page, folder = tmp_path / "page.md", tmp_path / "folder"
    page.write_text(
        "```toml\n# mine.toml\n[nonesuch]\n```\n\n"
        "```\nweft plan mine.toml --cluster h100x8    # exit code 2\n```\n\n"
        "```\nweft train mine.toml \\\n    --layout dp2\n```\n\n"
        "```\nweft train mine.toml --nodes 2 --rdzv host0 --nonesuch\npip install weft\n```\n\n"
        "```\n$ weft draw 1f1b --ranks 2 --microbatches 2\n1f1b: makespan 9 s\n...\n```\n\n"
        "```\nweft draw 1f1b --ranks 2 --microbatches 2\n```\n\n```\n1f1b: makespan 8 s\n...\n```\n"
    )
    texts = [command.text for command in commands(page)]
    assert texts[1:3] == [
        "weft train mine.toml --layout dp2",
        "weft train mine.toml --nodes 2 --rdzv host0 --nonesuch",
    ]
    found = faults(page, folder)
    assert [fault.split(":")[0] for fault in found] == [
        "weft train mine.toml --layout dp2",
        "weft train mine.toml --nodes 2 --rdzv host0 --nonesuch",
        "weft draw 1f1b --ranks 2 --microbatches 2 prints, run docs/refresh.py",
        "weft draw 1f1b --ranks 2 --microbatches 2 prints, run docs/refresh.py",
    ]
    assert "exit code 2, and not 0" in found[0]


def test_every_reason_not_to_run_a_command_has_one() -> None:
    texts = [command.text for page in PAGES for command in commands(page)]
    for table in (refresh.NOT_RUN, refresh.NOT_SHOWN):
        assert not [one for one in table if not any(refresh.re.search(one, t) for t in texts)]
