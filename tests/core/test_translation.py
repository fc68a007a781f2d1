"""Texts are translated as messages of which they are instances."""

from __future__ import annotations

import pytest

from weft.core import ConfigError, choose_language, language, translation

CATALOGUE = translation.Catalogue(
    {
        "is not a number": "不是数",
        "write {wanted}": "写{wanted}",
        "a number above {least}": "大于 {least} 的数",
        "is no key of {table}": "不是{table}的键",
        "the folder has {count} of {all} files": "目录有 {all} 个文件中的 {count} 个",
        "weft: {axes} is refused: {why}": "weft: {axes} 被拒绝：{why}",
        "known: {words}": "已知的有：{words}",
        "{name} is {kind}": "{name} 是 {kind}",
        "write {{ a = {x} }}": "写 {{ a = {x} }}",
        "loss": "损失",
        "worst gradient": "最差的梯度",
    }
)


@pytest.mark.parametrize(
    ("text", "translated"),
    [
        ("is not a number", "不是数"),
        ("a = 1: is not a number. Write a number above 0.", "a = 1：不是数。写大于 0 的数。"),
        ("write x", "写 x"),
        ("write { a = 1 }", "写 { a = 1 }"),
        ("is no key of [train]", "不是[train]的键"),
        ("the folder has 2 of {3} files", "目录有 {3} 个文件中的 2 个"),
        ("is not a number (a number above 2)", "不是数（大于 2 的数）"),
        ("a.b = 'x': is not a number. Known: c, d.", "a.b = 'x'：不是数。已知的有：c, d。"),
        ("a = {'b': 1}: is not a number. Write c.", "a = {'b': 1}：不是数。写 c。"),
        (
            "weft: dp2 is refused: a = 1: is not a number. Write c.",
            "weft: dp2 被拒绝：a = 1：不是数。写 c。",
        ),
        ("no message at all", "no message at all"),
        ("there is no such thing", "there is no such thing"),
        ("a = 1: is something else. Write c.", "a = 1: is something else. Write c."),
        ("one line\nis not a number", "one line\n不是数"),
    ],
)
def test_a_text_is_translated(text: str, translated: str) -> None:
    assert CATALOGUE.translate(text) == translated


def test_columns_stay_where_they_were() -> None:
    table = "  loss            1.0   a\n  worst gradient  2.0   b"
    assert CATALOGUE.translate(table) == "  损失            1.0   a\n  最差的梯度      2.0   b"


@pytest.mark.parametrize(
    ("variables", "code"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh"}, "zh"),
        ({"LANG": "de_DE.UTF-8"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "LANGUAGE": "en"}, "en"),
        ({"LANG": "C.UTF-8", "LANGUAGE": "zh_TW:en"}, "zh"),
    ],
)
def test_the_locale_says_the_language(
    variables: dict[str, str], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in translation.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert language() == code


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--lang = 'fr'.*Choose one of en, zh"):
        choose_language("fr")


def test_a_catalogue_is_read() -> None:
    """What is fuzzy or empty is left out; long texts go over several lines."""
    text = (
        '#: a\nmsgid "one"\nmsgstr "一"\n\nmsgid ""\n"two "\n"lines\\n"\nmsgstr ""\n"两行\\n"\n\n'
        '#, fuzzy\nmsgid "three"\nmsgstr "三"\n\nmsgid "four"\nmsgstr ""\n'
    )
    assert translation.read_messages(text) == {"one": "一", "two lines\n": "两行\n"}
