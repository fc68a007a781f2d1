"""The command line in Chinese."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.commands import Command
from weft.cli.app import app

ENGLISH = re.compile(r"[A-Za-z]+ [a-z]+ [a-z]+")


def said(tmp_path: Path, *words: str) -> tuple[str, int]:
    command = Command(tmp_path / "log", *words)
    code = command.wait(120)
    return command.said(), code


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
        (["train"], ["缺少参数 'RUN.toml'。", "用 'weft train --help' 查看帮助"]),
        (["train", "--nope"], ["没有选项 --nope"]),
        (["nope"], ["没有命令 'nope'。"]),
        (["draw", "1f1b", "--local", "-1"], ["'--local' 的值无效：应不小于 0"]),
    ],
)
def test_errors_keep_their_values(words: list[str], parts: list[str], tmp_path: Path) -> None:
    text, code = said(tmp_path, "--lang", "zh", *words)
    assert code == 2 and all(part in text for part in parts), text


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
