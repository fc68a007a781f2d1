"""The command line in Chinese."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.commands import Command
from tests.run_files import TINY
from weft.cli.app import app
from weft.core import translate
from weft.launch.watchdog import RankLocation, hang_report

ENGLISH = re.compile(r"[A-Za-z]+ [a-z]+ [a-z]+")
WORSE = ["--slow", "1.5", "--mtbf", "1000", "--checkpoint", "20", "--scale", "weak", "--to", "16"]
RUN = TINY.replace("layers = 1", "layers = 2")  # a block for each stage


def said(tmp_path: Path, *words: str) -> tuple[str, int]:
    command = Command(tmp_path / "log", *words)
    code = command.wait(120)
    return command.said(), code


def write_run(folder: Path) -> Path:
    path = folder / "run.toml"
    path.write_text(RUN, encoding="utf-8")
    return path


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


@pytest.mark.parametrize("path", commands(typer.main.get_command(app)), ids=" ".join)
def test_help_is_in_chinese(path: tuple[str, ...], tmp_path: Path) -> None:
    text, code = said(tmp_path, "--lang", "zh", *path, "--help")
    assert code == 0 and "用法：weft" in text and "选项" in text
    assert not ENGLISH.findall(re.sub(r"`[^`]*`|weft [a-z]+( [a-z]+)?", "", text))
    english, _ = said(tmp_path, "--lang=en", *path, "--help")
    assert "Usage: weft" in english and ENGLISH.search(english)
    assert not re.search(r"[\u4e00-\u9fff]", english)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["train", "nowhere.toml"], ["run file = 'nowhere.toml'：没有这个文件。"]),
        (
            ["draw", "1f1b", "--forward", "x"],
            ["'x'：既不是数，也不是一组数。写 1.5 或"],
        ),
        (["train"], ["weft: 缺少参数 'RUN.toml' （帮助：weft train --help）"]),
        (["train", "--nope"], ["没有选项 --nope"]),
        (["nope"], ["没有命令 'nope' （帮助：weft --help）"]),
        (["draw", "1f1b", "--local", "-1"], ["'--local' 的值无效：应不小于 0"]),
    ],
)
def test_errors_keep_their_values(words: list[str], parts: list[str], tmp_path: Path) -> None:
    text, code = said(tmp_path, "--lang", "zh", *words)
    assert code == 2 and all(part in text for part in parts), text


TABLES = [
    ["draw", "1f1b", "pipedream", "--ranks", "2", "--microbatches", "4"],
    ["draw", "--collective", "ring", "--ranks", "3"],
    ["draw", "--collective", "broadcast", "--ranks", "3"],
    ["draw", "--plan", "RUN", "--layout", "tp2.pp2"],
    ["plan", "RUN", "--cluster", "h100x8"],
    ["plan", "RUN", "--cluster", "h100x8", "--layout", "dp8", "--layout", "fsdp8"],
    ["simulate", "RUN", "--cluster", "h100x8", "--layout", "pp2.dp4", *WORSE],
    ["verify", "RUN", "--layout", "tp2", "--steps", "1"],
]


@pytest.mark.parametrize("words", TABLES, ids=" ".join)
def test_tables_are_in_chinese(words: list[str], tmp_path: Path) -> None:
    path = write_run(tmp_path)
    text, code = said(tmp_path, "--lang", "zh", *(str(path) if w == "RUN" else w for w in words))
    assert code == 0 and re.search(r"[\u4e00-\u9fff]", text)
    # values of a table, and words that a legend explains
    kept = r"NVIDIA .* GiB|cp or ulysses|after (the last step|step \d+)|weft train \S+"
    kept += r"|[\w ]+ exposed|Shoeybi et al|^[FBW0-9 -]+$"
    assert not ENGLISH.findall(re.sub(kept, "", text, flags=re.MULTILINE)), text


def test_what_is_said_of_a_hang_is_in_chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGUAGE", "zh")
    waits = RankLocation("step 3", "waits in all_reduce, at a.py:4 in f: `work()`")
    late = RankLocation("step 2", "is in no collective, but at b.py:5 in g: `other()`")
    assert translate(hang_report({0: waits, 1: late}, 2, 60.0)).splitlines() == [
        "60 s 没有进展：rank 1 不在任何集合通信中，其他 rank 在等它",
        "  rank 0：在 step 3 之后，在 all_reduce 中等待，位于 a.py:4，f 中：`work()`",
        "  rank 1：在 step 2 之后，不在任何集合通信中，而在 b.py:5，g 中：`other()`",
    ]


def test_an_unknown_language_is_refused(tmp_path: Path) -> None:
    text, code = said(tmp_path, "--lang", "fr", "draw", "1f1b")
    assert code == 2
    assert "--lang = 'fr'" in text and "Choose one of en, zh." in text


def test_the_locale_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LANGUAGE")
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert "用法：weft" in said(tmp_path, "--help")[0]
    assert "Usage: weft" in said(tmp_path, "--lang", "en", "--help")[0]


def test_json_is_the_same_in_each_language(tmp_path: Path) -> None:
    words = ["draw", "1f1b", "--json"]
    assert said(tmp_path, "--lang", "zh", *words) == said(tmp_path, *words)
